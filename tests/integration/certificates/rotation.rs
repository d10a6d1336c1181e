//! Any history of renewals and changes of the CA: several writers, lost and late writes, crashes. At each time
//! each client trusts each server, and no certificate is used after its end.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use gpupack::rotation::plan::{
    Owner, Place, Rules, Seen, SeenBundle, SeenCa, SeenCertificate, SeenNext, SeenScheduler, Step,
    UnixTime, steps,
};
use proptest::prelude::*;

const RULES: Rules = Rules {
    certificate: Duration::from_secs(1_200),
    ca: Duration::from_secs(6_000),
    spread: Duration::from_secs(120),
};

/// How old what a client or a server has read may be.
const LAG: u64 = 100;

/// A writer passes at least this often.
const PASSES_EVERY: u64 = 20;

/// A CA by number.
type Ca = u32;
type Bundle = BTreeSet<Ca>;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Next {
    ca: Ca,
    ends: u64,
    added: u64,
    published: Option<u64>,
}

/// The Secret of the CA.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Authority {
    signer: Ca,
    starts: u64,
    ends: u64,
    next: Option<Next>,
    old: BTreeMap<Ca, u64>,
}

impl Authority {
    fn bundle(&self) -> Bundle {
        let next = self.next.iter().map(|next| next.ca);
        [self.signer].into_iter().chain(next).chain(self.old.keys().copied()).collect()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Certificate {
    by: Ca,
    ends: u64,
    bundle: Bundle,
}

/// An object with its version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Object<T> {
    version: u64,
    value: T,
}

/// kube-scheduler as the API server shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Deployment {
    /// The bundle for which its pods are to be replaced.
    wanted: Bundle,
    /// The bundle that its pods have read.
    running: Bundle,
}

/// Everything but the CA, and the CA: they are read one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Others {
    certificates: BTreeMap<Owner, Object<Option<Certificate>>>,
    places: BTreeMap<Place, Object<Bundle>>,
    scheduler: Object<Deployment>,
}

/// What a writer has read.
#[derive(Clone, Debug)]
struct Read {
    others: Others,
    ca: Option<Object<Option<Authority>>>,
}

#[derive(Clone, Debug)]
enum Event {
    /// Time passes.
    Wait(u64),
    /// A writer reads all but the CA.
    ReadOthers(usize),
    /// It reads the CA.
    ReadCa(usize),
    /// It carries out what is due then, with what it has read, as far as it gets. Of these writes the answer is
    /// lost, and of those nothing is done.
    Write { writer: usize, at_most: usize, lost: u8, undone: u8 },
    /// A writer does everything without a pause.
    Pass(usize),
    /// The pods of kube-scheduler are replaced.
    Rolled,
    /// Somebody starts kube-scheduler again.
    Restarted,
}

/// Who starts kube-scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StartedBy {
    Deployment,
    Operator,
}

struct World {
    rules: Rules,
    now: u64,
    cas: Ca,
    ca: Object<Option<Authority>>,
    others: Others,
    readers: [Option<Read>; 2],
    started_by: StartedBy,
    /// What everything was before, for those that read late; newest last.
    history: Vec<(u64, Others, Bundle)>,
    last_pass: u64,
    changes_of_ca: usize,
    /// When the CA began to be needed by all: with the first certificates.
    is_installed: bool,
}

impl World {
    fn new(started_by: StartedBy) -> Self {
        Self::with(RULES, started_by)
    }

    fn with(rules: Rules, started_by: StartedBy) -> Self {
        let others = Others {
            certificates: Owner::ALL.map(|owner| (owner, Object::default())).into(),
            places: Place::ALL.map(|place| (place, Object::default())).into(),
            ..Others::default()
        };
        let mut world = Self {
            rules,
            now: 1_000_000,
            cas: 0,
            ca: Object::default(),
            others,
            readers: [None, None],
            started_by,
            history: Vec::new(),
            last_pass: 1_000_000,
            changes_of_ca: 0,
            is_installed: false,
        };
        // Two replicas start at once on empty objects.
        for event in [
            Event::ReadOthers(0),
            Event::ReadOthers(1),
            Event::ReadCa(0),
            Event::ReadCa(1),
            Event::Write { writer: 0, at_most: 9, lost: 0, undone: 0 },
            Event::Write { writer: 1, at_most: 9, lost: 0, undone: 0 },
            Event::Pass(1),
            Event::Restarted,
        ] {
            world.play(&event);
        }
        world.is_installed = true;
        world.history.clear();
        world.note();
        world
    }

    fn seen(&self, read: &Read) -> Seen {
        let ca = read.ca.as_ref().and_then(|ca| ca.value.as_ref());
        let bundle = ca.map(Authority::bundle).unwrap_or_default();
        let certificates = read.others.certificates.iter().map(|(owner, secret)| {
            let certificate = secret.value.as_ref().filter(|it| it.ends > self.now && ca.is_some());
            let seen = certificate.map_or(SeenCertificate::Unusable, |it| SeenCertificate::Made {
                ends: UnixTime(it.ends),
                is_by_signer: ca.is_some_and(|ca| ca.signer == it.by),
                has_bundle: it.bundle == bundle,
            });
            (*owner, seen)
        });
        let bundles = read.others.places.iter().map(|(place, found)| {
            let is_current = found.value == bundle;
            (*place, if is_current { SeenBundle::Current } else { SeenBundle::Outdated })
        });
        let deployment = &read.others.scheduler.value;
        let scheduler = match self.started_by {
            StartedBy::Operator => SeenScheduler::NotOurs,
            StartedBy::Deployment if deployment.wanted != bundle => SeenScheduler::Outdated,
            StartedBy::Deployment if deployment.running != bundle => SeenScheduler::Rolling,
            StartedBy::Deployment => SeenScheduler::Current,
        };
        let ca = ca.map(|ca| SeenCa {
            starts: UnixTime(ca.starts),
            ends: UnixTime(ca.ends),
            next: ca.next.as_ref().map(|next| SeenNext {
                ends: UnixTime(next.ends),
                added: UnixTime(next.added),
                published: next.published.map(UnixTime),
            }),
            old: ca.old.values().map(|until| UnixTime(*until)).collect(),
        });
        Seen { ca, certificates: certificates.collect(), bundles: bundles.collect(), scheduler }
    }

    fn play(&mut self, event: &Event) {
        match event {
            Event::Wait(seconds) => self.wait(*seconds),
            Event::ReadOthers(writer) => {
                self.readers[*writer] = Some(Read { others: self.others.clone(), ca: None });
            }
            Event::ReadCa(writer) => {
                if let Some(read) = &mut self.readers[*writer] {
                    read.ca.get_or_insert_with(|| self.ca.clone());
                }
            }
            Event::Write { writer, at_most, lost, undone } => {
                let Some(read) = self.readers[*writer].take().filter(|read| read.ca.is_some())
                else {
                    return;
                };
                let due = steps(&self.seen(&read), &self.rules, UnixTime(self.now));
                for (place, step) in due.into_iter().take(*at_most).enumerate() {
                    if undone >> place & 1 == 0 {
                        self.carry_out(&read, step);
                    }
                    if lost >> place & 1 == 1 {
                        break; // as after a timeout and a restart
                    }
                }
            }
            Event::Pass(writer) => self.pass(*writer),
            Event::Rolled => {
                if self.started_by == StartedBy::Deployment
                    && !self.others.scheduler.value.wanted.is_empty()
                {
                    self.restart();
                }
            }
            Event::Restarted => self.restart(),
        }
        self.note();
    }

    fn restart(&mut self) {
        let secret = &self.others.certificates[&Owner::Scheduler].value;
        let running = secret.as_ref().map(|it| it.bundle.clone()).unwrap_or_default();
        self.others.scheduler.value.running = running;
        self.others.scheduler.version += 1;
    }

    fn pass(&mut self, writer: usize) {
        for _ in 0..8 {
            let read = Read { others: self.others.clone(), ca: Some(self.ca.clone()) };
            let due = steps(&self.seen(&read), &self.rules, UnixTime(self.now));
            if due.is_empty() {
                self.last_pass = self.now;
                return;
            }
            for step in due {
                self.carry_out(&read, step);
                self.note();
            }
        }
        panic!("writer {writer} has always more to do: {:?}", self.ca);
    }

    /// kube-scheduler is started again until the deadline, by its Deployment or by the operator (an alert
    /// says so before), and at least a pass must succeed now and then.
    fn wait(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now += 1;
            if self.now >= self.last_pass + PASSES_EVERY {
                self.pass(0);
            }
            let read = Read { others: self.others.clone(), ca: Some(self.ca.clone()) };
            let deadline = self.seen(&read).restart_by(&self.rules);
            if deadline.is_some_and(|deadline| self.now + LAG + 1 >= deadline.0) {
                self.restart();
            }
            self.note();
            self.check();
        }
    }

    fn carry_out(&mut self, read: &Read, step: Step) {
        let found = read.ca.as_ref().expect("it was read");
        let is_of_ca = matches!(
            step,
            Step::MakeCa | Step::AddNext | Step::NotePublished(_) | Step::Switch(_) | Step::DropOld
        );
        if is_of_ca {
            if found.version == self.ca.version {
                let changed = self.changed(found.value.clone(), step);
                self.ca = Object { version: self.ca.version + 1, value: Some(changed) };
            }
            return;
        }
        let ca = found.value.as_ref().expect("others follow a CA");
        let bundle = ca.bundle();
        match step {
            Step::Sign(owner, ends) => {
                let certificate = Certificate { by: ca.signer, ends: ends.0, bundle };
                write(
                    &mut self.others.certificates,
                    &read.others.certificates,
                    owner,
                    Some(certificate),
                );
            }
            Step::AddBundle(owner) => {
                let before = read.others.certificates[&owner].value.clone();
                let certificate = before.map(|it| Certificate { bundle, ..it });
                write(&mut self.others.certificates, &read.others.certificates, owner, certificate);
            }
            Step::Publish(place) => {
                write(&mut self.others.places, &read.others.places, place, bundle)
            }
            Step::Roll => {
                if self.others.scheduler.version == read.others.scheduler.version {
                    self.others.scheduler.value.wanted = bundle;
                    self.others.scheduler.version += 1;
                }
            }
            _ => unreachable!("steps of the CA"),
        }
    }

    fn changed(&mut self, ca: Option<Authority>, step: Step) -> Authority {
        self.cas += 1;
        let (number, now, ends) = (self.cas, self.now, self.now + self.rules.ca.as_secs());
        let Some(mut ca) = ca.filter(|_| step != Step::MakeCa) else {
            assert!(!self.is_installed, "the CA is lost");
            let (next, old) = (None, BTreeMap::new());
            return Authority { signer: number, starts: now - 86_400, ends, next, old };
        };
        match step {
            Step::AddNext => ca.next = Some(Next { ca: number, ends, added: now, published: None }),
            Step::NotePublished(at) => {
                ca.next.as_mut().expect("it is the next one").published = at.map(|at| at.0);
            }
            Step::Switch(until) => {
                let next = ca.next.take().expect("it is the next one");
                ca.old.insert(ca.signer, until.0);
                (ca.signer, ca.starts, ca.ends) = (next.ca, next.added, next.ends);
                self.changes_of_ca += 1;
            }
            Step::DropOld => ca.old.retain(|_, until| *until > now),
            _ => unreachable!("steps of the CA"),
        }
        ca
    }

    fn note(&mut self) {
        let bundle = self.ca.value.as_ref().map(Authority::bundle).unwrap_or_default();
        if self.history.last().is_none_or(|(_, others, of)| (others, of) != (&self.others, &bundle))
        {
            self.history.push((self.now, self.others.clone(), bundle));
        }
        // The newest one that is older than the lag still counts.
        let oldest = self.now.saturating_sub(LAG);
        while self.history.get(1).is_some_and(|(since, ..)| *since <= oldest) {
            self.history.remove(0);
        }
    }

    /// Whatever version each has read within the lag.
    fn check(&self) {
        let certificate = |owner: Owner| {
            let all = self
                .history
                .iter()
                .filter_map(move |(_, others, _)| others.certificates[&owner].value.as_ref());
            all.collect::<Vec<_>>()
        };
        let place = |place: Place| {
            self.history.iter().map(move |(_, others, _)| &others.places[&place].value).collect()
        };
        let of_replicas: Vec<&Bundle> = self.history.iter().map(|(_, _, bundle)| bundle).collect();
        let running = &self.others.scheduler.value.running;
        let pairs: [(&str, Vec<&Bundle>, Owner); 6] = [
            ("agents call the extender", place(Place::Agents), Owner::Extender),
            ("the API server calls the extender", place(Place::ApiService), Owner::Extender),
            ("the API server calls the webhook", place(Place::Webhooks), Owner::Webhook),
            ("kube-scheduler calls the extender", vec![running], Owner::Extender),
            ("the extender is called by kube-scheduler", of_replicas.clone(), Owner::Scheduler),
            ("replicas call each other", of_replicas, Owner::Extender),
        ];
        for (what, bundles, owner) in pairs {
            for certificate in certificate(owner) {
                assert!(certificate.ends > self.now, "{what}: it ended at {}", certificate.ends);
                for bundle in &bundles {
                    let ca = &self.ca.value;
                    assert!(
                        bundle.contains(&certificate.by),
                        "{what}: {certificate:?}, {bundle:?}, {ca:?}"
                    );
                }
            }
        }
    }
}

fn write<K: Ord, T>(
    objects: &mut BTreeMap<K, Object<T>>,
    read: &BTreeMap<K, Object<T>>,
    key: K,
    value: T,
) {
    let before = read[&key].version;
    let object = objects.get_mut(&key).expect("all exist");
    if object.version == before {
        *object = Object { version: before + 1, value };
    }
}

fn event() -> impl Strategy<Value = Event> {
    let writer = 0..2_usize;
    prop_oneof![
        4 => prop_oneof![1..4_u64, 1..40_u64, 1..400_u64].prop_map(Event::Wait),
        3 => writer.clone().prop_map(Event::ReadOthers),
        3 => writer.clone().prop_map(Event::ReadCa),
        4 => (writer.clone(), 1..8_usize, any::<u8>(), any::<u8>()).prop_map(
            |(writer, at_most, lost, undone)| Event::Write { writer, at_most, lost, undone }
        ),
        1 => writer.prop_map(Event::Pass),
        2 => Just(Event::Rolled),
        1 => Just(Event::Restarted),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn every_client_trusts_every_server_at_each_time(
        is_ours in any::<bool>(),
        events in prop::collection::vec(event(), 1..300),
    ) {
        let by = if is_ours { StartedBy::Deployment } else { StartedBy::Operator };
        let mut world = World::new(by);
        for event in &events {
            world.play(event);
        }
    }
}

#[test]
fn the_ca_changes_again_and_again_with_nothing_but_time() {
    for by in [StartedBy::Deployment, StartedBy::Operator] {
        let mut world = World::new(by);
        for _ in 0..3_000 {
            world.play(&Event::Wait(7));
            world.play(&Event::Rolled);
        }
        let changes = world.changes_of_ca;
        assert!(changes >= 4, "{by:?}: {changes} changes in 21000 s");
        assert!(world.ca.value.is_some_and(|ca| ca.old.len() <= 1), "old ones are dropped");
    }
}

/// The checker finds what it is for.
#[test]
#[should_panic(expected = "agents call the extender")]
fn a_ca_that_signs_before_it_is_published_is_found() {
    let mut world = World::new(StartedBy::Deployment);
    let mut ca = world.ca.value.clone().expect("it is made");
    ca.signer = 99;
    ca.old.clear();
    world.ca = Object { version: world.ca.version + 1, value: Some(ca) };
    world.play(&Event::Pass(0));
    world.play(&Event::Wait(1));
}

/// So is a change that does not wait until clients have read the bundle.
#[test]
#[should_panic(expected = "agents call the extender")]
fn a_change_that_is_faster_than_clients_read_is_found() {
    let rules = Rules { spread: Duration::from_secs(LAG / 2), ..RULES };
    let mut world = World::with(rules, StartedBy::Deployment);
    for _ in 0..3_000 {
        world.play(&Event::Wait(7));
        world.play(&Event::Rolled);
    }
}
