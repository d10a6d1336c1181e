//! What to do about the certificates that gpupack makes, given what there is and the time.
//!
//! A CA is changed in stages. The next one is first added to the *bundle*: the certificates of CAs that
//! clients trust. When every client must have read that bundle, the next CA signs. The old one stays in
//! the bundle until the last certificate that it signed has ended. So at each time each client trusts each
//! server that it calls, although clients read the bundle up to [`Rules::spread`] later than it is
//! written.
//!
//! Nothing is remembered between two calls: what there is says how far a change is. So a process that ends
//! at any point, or loses the answer to a write, goes on. Writers see the CA *after* all other objects, and
//! write an object only in the version that they saw. So none of them takes back what another one wrote.

use std::collections::BTreeMap;
use std::time::Duration;

/// Seconds since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnixTime(pub u64);

impl UnixTime {
    /// This long after.
    #[must_use]
    pub fn plus(self, time: Duration) -> Self {
        Self(self.0.saturating_add(time.as_secs()))
    }

    /// This long before, not before 1970.
    #[must_use]
    pub fn minus(self, time: Duration) -> Self {
        Self(self.0.saturating_sub(time.as_secs()))
    }
}

/// How far a clock may be from that of the API server. Certificates begin an hour early, so that less does no harm.
const CLOCKS_AGREE_WITHIN: u64 = 600;

/// Differences of clocks, by name. Steps are large: a text about a difference stays the same.
const DIFFERENCES: [(u64, &str); 5] = [
    (365 * 86_400, "more than a year"),
    (30 * 86_400, "more than a month"),
    (86_400, "more than a day"),
    (3_600, "more than an hour"),
    (CLOCKS_AGREE_WITHIN, "more than ten minutes"),
];

/// A clock that is too far from that of the API server to decide by it what has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongClock {
    /// How far.
    pub by: &'static str,
    /// To which side.
    pub side: &'static str,
}

impl WrongClock {
    /// The clock of this machine, if it is wrong.
    pub fn found(own: UnixTime, of_server: UnixTime) -> Option<Self> {
        let far = own.0.abs_diff(of_server.0);
        let (_, by) = DIFFERENCES.into_iter().find(|(least, _)| far > *least)?;
        let side = if own > of_server { "ahead of" } else { "behind" };
        Some(Self { by, side })
    }
}

/// How long things last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// A certificate. It is renewed when a third of this is left.
    pub certificate: Duration,
    /// A CA: at least four times as long. The next one is added when a third of this is left.
    pub ca: Duration,
    /// Until every client has read a changed bundle and every server its changed certificate: at most a
    /// quarter of [`Rules::certificate`].
    pub spread: Duration,
}

impl Rules {
    /// When a certificate that is signed now ends: not after its CA.
    pub fn end_of_certificate(&self, ca_ends: UnixTime, now: UnixTime) -> UnixTime {
        now.plus(self.certificate).min(ca_ends)
    }

    /// How often is looked. A bundle spreads within [`Rules::spread`] with this pause in front.
    pub fn look_every(&self) -> Duration {
        (self.spread / 8).clamp(Duration::from_secs(1), Duration::from_secs(60))
    }
}

/// Who has a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// All replicas of the extender.
    Extender,
    /// kube-scheduler.
    Scheduler,
    /// The admission webhook.
    Webhook,
}

impl Owner {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Extender, Self::Scheduler, Self::Webhook];
}

/// Where the bundle is besides the Secrets with certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// The ConfigMap that agents read.
    Agents,
    /// The configuration by which the API server calls the webhook.
    Webhooks,
    /// The APIService by which the API server calls the extender.
    ApiService,
}

impl Place {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Agents, Self::Webhooks, Self::ApiService];
}

/// The CA that signs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenCa {
    /// From when it is valid.
    pub starts: UnixTime,
    /// Until when it is valid.
    pub ends: UnixTime,
    /// The CA that is to sign next.
    pub next: Option<SeenNext>,
    /// Until when each earlier CA is needed.
    pub old: Vec<UnixTime>,
}

/// The CA that is to sign next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenNext {
    /// Until when it is valid.
    pub ends: UnixTime,
    /// When it was added to the bundle.
    pub added: UnixTime,
    /// When the bundle with it was seen in all places.
    pub published: Option<UnixTime>,
}

/// The Secret of one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeenCertificate {
    /// There is no such Secret.
    NoSecret,
    /// The Secret has no certificate that can be used.
    Unusable,
    /// It has one.
    Made {
        /// Until when it is valid.
        ends: UnixTime,
        /// Whether the CA that signs now has signed it.
        is_by_signer: bool,
        /// Whether the bundle beside it is the present one.
        has_bundle: bool,
    },
}

/// The bundle in one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeenBundle {
    /// There is no such object, or it may not be read.
    Absent,
    /// Another bundle, or none.
    Outdated,
    /// The present one.
    Current,
}

/// kube-scheduler, which reads the bundle only when it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeenScheduler {
    /// Others start it, and have not confirmed the present bundle.
    NotOurs,
    /// Our Deployment was not rolled for the present bundle.
    Outdated,
    /// Its pods are being replaced for the present bundle.
    Rolling,
    /// It runs with the present bundle.
    Current,
}

/// Everything that there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The CA that signs; `None`: there is none that can be used.
    pub ca: Option<SeenCa>,
    /// The certificates. An owner that is not here has no Secret.
    pub certificates: BTreeMap<Owner, SeenCertificate>,
    /// The bundle in other places. A place that is not here is absent.
    pub bundles: BTreeMap<Place, SeenBundle>,
    /// kube-scheduler.
    pub scheduler: SeenScheduler,
}

/// One write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make a CA and forget what was in its place.
    MakeCa,
    /// Make the CA that is to sign next, and add it to the bundle.
    AddNext,
    /// Note when the bundle with the next CA was in all places, or that it is not.
    NotePublished(Option<UnixTime>),
    /// Let the next CA sign. The present one is needed until this time.
    Switch(UnixTime),
    /// Remove the earlier CAs that are no longer needed.
    DropOld,
    /// Sign a certificate that ends at this time, and write the bundle beside it.
    Sign(Owner, UnixTime),
    /// Write the bundle beside a certificate.
    AddBundle(Owner),
    /// Write the bundle.
    Publish(Place),
    /// Roll the Deployment of kube-scheduler.
    Roll,
}

impl Seen {
    /// Whether the clock must be wrong: the CA begins only later. Then nothing is written.
    pub fn is_before_ca(&self, now: UnixTime) -> bool {
        self.ca.as_ref().is_some_and(|ca| ca.starts > now)
    }

    /// Until when kube-scheduler must be started again, if somebody must do that.
    pub fn restart_by(&self, rules: &Rules) -> Option<UnixTime> {
        let ca = self.ca.as_ref()?;
        let next = ca.next.as_ref()?;
        (self.scheduler != SeenScheduler::Current).then(|| ca.switch_by(next, rules))
    }

    /// Whether the present bundle is in all places.
    fn is_published(&self) -> bool {
        let has_none = |it: &SeenCertificate| match it {
            SeenCertificate::NoSecret => false,
            SeenCertificate::Unusable => true,
            SeenCertificate::Made { has_bundle, .. } => !has_bundle,
        };
        !self.certificates.values().any(has_none)
            && !self.bundles.values().any(|it| *it == SeenBundle::Outdated)
    }

    /// The last end of a certificate.
    fn last_end(&self) -> UnixTime {
        let ends = self.certificates.values().map(|it| match it {
            SeenCertificate::Made { ends, .. } => *ends,
            SeenCertificate::NoSecret | SeenCertificate::Unusable => UnixTime(0),
        });
        ends.max().unwrap_or_default()
    }
}

impl SeenCa {
    /// When the next CA signs, even if not all clients trust it yet: certificates could not last
    /// as long as they should.
    fn switch_by(&self, next: &SeenNext, rules: &Rules) -> UnixTime {
        let spreads = next.added.plus(2 * rules.spread);
        self.ends.minus(rules.certificate).max(spreads).min(self.ends.minus(2 * rules.spread))
    }
}

/// The writes that are due, in their order. A write of the CA is alone: the others are found when the CA
/// is as it was written.
pub fn steps(seen: &Seen, rules: &Rules, now: UnixTime) -> Vec<Step> {
    let Some(ca) = &seen.ca else { return vec![Step::MakeCa] };
    if seen.is_before_ca(now) {
        return Vec::new();
    }
    match step_of_ca(seen, ca, rules, now) {
        Some(step) => vec![step],
        None => other_steps(seen, ca, rules, now),
    }
}

fn step_of_ca(seen: &Seen, ca: &SeenCa, rules: &Rules, now: UnixTime) -> Option<Step> {
    let needed = || {
        let ends = now.plus(rules.certificate).max(seen.last_end());
        Step::Switch(ends.plus(2 * rules.spread).min(ca.ends))
    };
    let next = ca.next.as_ref().filter(|next| next.ends > now);
    if ca.ends <= now {
        return Some(next.map_or(Step::MakeCa, |_| needed()));
    }
    if ca.old.iter().any(|until| *until <= now) {
        return Some(Step::DropOld);
    }
    let Some(next) = next else {
        return (now.plus(rules.ca / 3) >= ca.ends).then_some(Step::AddNext);
    };
    let is_published = seen.is_published();
    if is_published && next.published.is_none() {
        return Some(Step::NotePublished(Some(now)));
    }
    let is_trusted = is_published
        && seen.scheduler == SeenScheduler::Current
        && next.published.is_some_and(|at| now >= at.plus(rules.spread));
    if is_trusted || now >= ca.switch_by(next, rules) {
        return Some(needed());
    }
    // Another client has written over the bundle: those that read that must read ours again.
    (!is_published && next.published.is_some()).then_some(Step::NotePublished(None))
}

fn other_steps(seen: &Seen, ca: &SeenCa, rules: &Rules, now: UnixTime) -> Vec<Step> {
    let end = rules.end_of_certificate(ca.ends, now);
    let mut steps = Vec::new();
    for (owner, certificate) in &seen.certificates {
        match certificate {
            SeenCertificate::NoSecret => {}
            SeenCertificate::Unusable => steps.push(Step::Sign(*owner, end)),
            SeenCertificate::Made { ends, is_by_signer, has_bundle } => {
                let is_late = now.plus(rules.certificate / 3) >= *ends && end > *ends;
                if is_late || !is_by_signer {
                    steps.push(Step::Sign(*owner, end));
                } else if !has_bundle {
                    steps.push(Step::AddBundle(*owner));
                }
            }
        }
    }
    let outdated = seen.bundles.iter().filter(|(_, bundle)| **bundle == SeenBundle::Outdated);
    steps.extend(outdated.map(|(place, _)| Step::Publish(*place)));
    // New pods read what is in the Secret when they start.
    let is_ready = matches!(
        seen.certificates.get(&Owner::Scheduler),
        Some(SeenCertificate::Made { is_by_signer: true, has_bundle: true, .. })
    );
    if is_ready && seen.scheduler == SeenScheduler::Outdated {
        steps.push(Step::Roll);
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: Rules = Rules {
        certificate: Duration::from_secs(900),
        ca: Duration::from_secs(9_000),
        spread: Duration::from_secs(100),
    };

    fn at(seconds: u64) -> UnixTime {
        UnixTime(seconds)
    }

    fn made(ends: u64) -> SeenCertificate {
        SeenCertificate::Made { ends: at(ends), is_by_signer: true, has_bundle: true }
    }

    /// A CA of 1000 to 10000, certificates until 5900, the bundle everywhere, our kube-scheduler.
    fn seen() -> Seen {
        Seen {
            ca: Some(SeenCa { starts: at(1_000), ends: at(10_000), next: None, old: Vec::new() }),
            certificates: Owner::ALL.map(|owner| (owner, made(5_900))).into(),
            bundles: Place::ALL.map(|place| (place, SeenBundle::Current)).into(),
            scheduler: SeenScheduler::Current,
        }
    }

    fn ca(seen: &mut Seen) -> &mut SeenCa {
        seen.ca.as_mut().unwrap()
    }

    fn due(seen: &Seen, now: u64) -> Vec<Step> {
        steps(seen, &RULES, at(now))
    }

    #[test]
    fn a_clock_is_wrong_that_is_far_from_the_api_servers() {
        let found = |own, server| WrongClock::found(at(own), at(server));
        assert_eq!(found(10_000, 10_600), None);
        assert_eq!(found(10_600, 10_000), None);
        let ten = Some(WrongClock { by: "more than ten minutes", side: "ahead of" });
        assert_eq!(found(10_601, 10_000), ten);
        let year = Some(WrongClock { by: "more than a year", side: "behind" });
        assert_eq!(found(0, u64::MAX), year);
    }

    #[test]
    fn certificates_are_renewed_at_two_thirds_and_made_where_they_are_missing() {
        let mut seen = seen();
        assert_eq!(due(&seen, 5_599), []);
        let all = Owner::ALL.map(|owner| Step::Sign(owner, at(6_500)));
        assert_eq!(due(&seen, 5_600), all);
        seen.certificates.insert(Owner::Webhook, SeenCertificate::NoSecret);
        seen.certificates.insert(Owner::Extender, SeenCertificate::Unusable);
        assert_eq!(due(&seen, 5_000), [Step::Sign(Owner::Extender, at(5_900))]);
    }

    #[test]
    fn no_certificate_outlives_its_ca_or_is_renewed_for_nothing() {
        let mut seen = seen();
        ca(&mut seen).ends = at(6_000);
        ca(&mut seen).next = Some(SeenNext { ends: at(15_000), added: at(5_900), published: None });
        seen.bundles.insert(Place::Agents, SeenBundle::Outdated);
        // The next CA is late. It signs before the present one ends.
        let until = Step::Switch(at(6_000));
        assert_eq!(due(&seen, 5_799)[0], Step::Sign(Owner::Extender, at(6_000)));
        assert_eq!(due(&seen, 5_800), [until]);
        seen.certificates.insert(Owner::Extender, made(6_000));
        assert!(!due(&seen, 5_799).contains(&Step::Sign(Owner::Extender, at(6_000))));
    }

    #[test]
    fn a_ca_is_changed_in_stages() {
        let mut seen = seen();
        seen.certificates = Owner::ALL.map(|owner| (owner, made(7_800))).into();
        assert_eq!(due(&seen, 6_999), []);
        assert_eq!(due(&seen, 7_000), [Step::AddNext]);
        ca(&mut seen).next = Some(SeenNext { ends: at(16_000), added: at(7_000), published: None });
        seen.bundles.insert(Place::Agents, SeenBundle::Outdated);
        seen.scheduler = SeenScheduler::Outdated;
        assert_eq!(due(&seen, 7_001), [Step::Publish(Place::Agents), Step::Roll]);
        assert_eq!(seen.restart_by(&RULES), Some(at(9_100)));
        seen.bundles.insert(Place::Agents, SeenBundle::Current);
        seen.scheduler = SeenScheduler::Rolling;
        assert_eq!(due(&seen, 7_002), [Step::NotePublished(Some(at(7_002)))]);
        ca(&mut seen).next.as_mut().unwrap().published = Some(at(7_002));
        assert_eq!(due(&seen, 7_200), [], "kube-scheduler is not started again yet");
        seen.scheduler = SeenScheduler::Current;
        assert_eq!(seen.restart_by(&RULES), None);
        assert_eq!(due(&seen, 7_101), [], "agents may not have read it");
        assert_eq!(due(&seen, 7_102), [Step::Switch(at(8_202))]);
        // Another client wrote over a bundle.
        seen.bundles.insert(Place::Webhooks, SeenBundle::Outdated);
        assert_eq!(due(&seen, 7_102), [Step::NotePublished(None)]);
        seen.bundles.insert(Place::Webhooks, SeenBundle::Current);
        *ca(&mut seen) =
            SeenCa { starts: at(6_000), ends: at(16_000), next: None, old: vec![at(8_202)] };
        let by_old =
            SeenCertificate::Made { ends: at(7_800), is_by_signer: false, has_bundle: true };
        seen.certificates.insert(Owner::Scheduler, by_old);
        assert_eq!(due(&seen, 7_103), [Step::Sign(Owner::Scheduler, at(8_003))]);
        seen.certificates.insert(Owner::Scheduler, made(8_003));
        seen.certificates.insert(Owner::Extender, made(9_000));
        seen.certificates.insert(Owner::Webhook, made(9_000));
        seen.certificates.insert(Owner::Scheduler, made(9_000));
        assert_eq!(due(&seen, 8_201), []);
        assert_eq!(due(&seen, 8_202), [Step::DropOld]);
    }

    #[test]
    fn a_kube_scheduler_of_others_has_time_until_the_ca_could_sign_no_whole_certificate() {
        let mut seen = seen();
        seen.scheduler = SeenScheduler::NotOurs;
        ca(&mut seen).next =
            Some(SeenNext { ends: at(16_000), added: at(7_000), published: Some(at(7_010)) });
        seen.certificates = Owner::ALL.map(|owner| (owner, made(9_900))).into();
        assert_eq!(due(&seen, 9_099), []);
        assert_eq!(seen.restart_by(&RULES), Some(at(9_100)));
        assert!(matches!(due(&seen, 9_100)[..], [Step::Switch(_)]));
        seen.scheduler = SeenScheduler::Current;
        assert!(matches!(due(&seen, 7_110)[..], [Step::Switch(_)]), "the restart is confirmed");
    }

    #[test]
    fn without_a_ca_one_is_made_and_before_it_begins_nothing_is_done() {
        let mut seen = seen();
        assert_eq!(due(&seen, 999), []);
        assert!(seen.is_before_ca(at(999)));
        assert_eq!(due(&seen, 10_000), [Step::MakeCa]);
        ca(&mut seen).next = Some(SeenNext { ends: at(16_000), added: at(7_000), published: None });
        assert!(matches!(due(&seen, 10_000)[..], [Step::Switch(_)]));
        seen.ca = None;
        assert_eq!(due(&seen, 5_000), [Step::MakeCa]);
    }
}
