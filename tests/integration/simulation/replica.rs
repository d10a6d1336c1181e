//! One process of the extender: everything that is shipped but the sockets.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use cli::serve::extender::settings;
use control::loops;
use control::shared::app::App;
use engine::ledger::nodes::state::Ledger;
use engine::model::reservation::ReservationState;
use futures::FutureExt;
use kube_api::config::file::Config;
use kube_api::pod::watch::{NodeLabels, NodeWatch, PodWatch, Sink};
use kube_api::request::placement::FenceWriter;
use kube_api::write::events::NoticeSender;
use kube_api::write::term::Term;
use kube_api::write::writer::ApiWriter;
use runtime::clock::{Clock, SimulatedTime};
use runtime::step::api_server::Head;
use runtime::step::outside::{Action, Outside, StepEvent};
use serde_json::Value;
use wire::ids::PodUid;
use wire::units::Timestamp;

use super::What;
use super::blind::SeenStarts;
use super::leading;
use super::lent_checks::Lists;
use super::upgrades::SeenWorks;

/// The clock of the API server when a simulation begins.
const BEGAN: u64 = 1_767_225_600;

/// What the clock of the API server shows, in seconds since 1970.
pub(super) fn api_seconds(now: u64) -> u64 {
    BEGAN + now / 1_000
}

pub(super) struct Replica {
    /// Distinguishes the lives of this replica: an answer to an earlier one is lost.
    pub(super) life: u64,
    pub(super) app: Arc<App>,
    pub(super) pods: PodWatch,
    pub(super) nodes: NodeWatch,
    /// How much of the API server's log its watch has shown.
    pub(super) seen: usize,
    pub(super) nodes_seen: u64,
    pub(super) is_listed: bool,
    /// Whether another list is on the agenda.
    pub(super) is_list_due: bool,
    pub(super) is_frozen: bool,
    pub(super) thawed: u64,
    /// When it got SIGTERM.
    pub(super) left: Option<u64>,
    /// Since when it posts nothing.
    pub(super) stopping_since: Option<u64>,
    /// Calls of *bind* that it has not answered.
    pub(super) under_way: usize,
    /// What reached it while it was frozen.
    pub(super) inbox: Vec<What>,
    pub(super) is_watch_due: bool,
    pub(super) is_nodes_due: bool,
    /// For when a timer is on the agenda.
    pub(super) next_due: Option<u64>,
    /// Whether it has answered calls.
    pub(super) was_ready: bool,
    /// The length of the log when its ledger was compared last.
    pub(super) checked: usize,
    /// When *bind* was called last for each pod.
    pub(super) calls: BTreeMap<String, u64>,
    /// When each call of *bind* came that has no answer yet, by pod.
    pub(super) open_calls: BTreeMap<String, BTreeSet<u64>>,
    /// Where *filter* passed each pod.
    pub(super) passed: BTreeMap<String, BTreeSet<String>>,
    /// Pods that *bind* was called for before *filter* passed any node: an earlier process may have.
    pub(super) unfiltered: BTreeSet<String>,
    /// When room was held for each pod first.
    pub(super) holds: BTreeMap<String, u64>,
    /// How many devices it has known, and since when: now, and as far back as holds last.
    pub(super) devices: VecDeque<(u64, u64)>,
    /// For how long kept room was free, and when that was added up last.
    pub(super) idle: (u64, u64),
    /// The newest session of each node, when it was heard, and who named a device last.
    pub(super) sessions: BTreeMap<usize, u64>,
    pub(super) heard: BTreeMap<usize, u64>,
    pub(super) owners: BTreeMap<String, usize>,
    /// The sequence number of the last report of each node and run of its agent.
    pub(super) last: BTreeMap<(usize, u64), u64>,
    /// Since when reports show processes of a pod on a device.
    pub(super) shown: BTreeMap<(String, String), u64>,
    /// The last lists of processes of each device.
    pub(super) lists: Lists,
    /// The devices that a report has named, and when the newest of these was sent.
    pub(super) sampled: BTreeMap<String, u64>,
    /// The era of each node's MIG instances, by its last report.
    pub(super) eras: BTreeMap<usize, u64>,
    /// What it knows of containers that started.
    pub(super) starts: SeenStarts,
    /// What the watch of nodes has shown of the driver of each node.
    pub(super) works: SeenWorks,
    /// The nodes of the last call of *filter* about each pod.
    pub(super) named: BTreeMap<String, BTreeSet<String>>,
    /// Reports that were sent while it was frozen: node, run and attempt.
    pub(super) old: BTreeSet<(usize, u64, u64)>,
    /// Since when it is frozen.
    pub(super) frozen: u64,
    /// Until then its watch of pods shows nothing.
    pub(super) stuck_until: u64,
    /// Until then no report reaches it.
    pub(super) deaf_until: u64,
    /// The pods for which room was kept until they are bound.
    pub(super) stood: BTreeSet<String>,
    /// For which pod no room is kept although it is first in line, and since when.
    pub(super) unkept: Option<(String, u64)>,
    pub(super) started: u64,
    time: &'static SimulatedTime,
    running: loops::RunningLoops,
}

impl Replica {
    /// A process that starts now. Its wall clock is so many seconds `ahead`; with a `place` it is one
    /// of several.
    pub(super) fn start(
        life: u64,
        now: u64,
        ahead: i64,
        config: Config,
        place: Option<usize>,
    ) -> Self {
        let unix = api_seconds(now).saturating_add_signed(ahead);
        // One simulation has few lives, so their clocks may stay forever.
        let time = Box::leak(Box::new(SimulatedTime::starting(unix)));
        let clock = Clock::simulated(time);
        let outside = Outside::new(clock);
        let replica = place.map(|place| leading::replica(place, life));
        let term = match place {
            Some(_) => Term::none(clock, life),
            None => Term::alone(clock, life),
        };
        let writer = ApiWriter::new(outside, config.api_timeout, term);
        let ledger = Arc::new(Ledger::new(settings(&config, &clock)));
        ledger.share_by(config.pools.clone());
        let app = App::new(Arc::clone(&ledger), config, writer, NoticeSender::unread());
        let app = Arc::new(match replica {
            Some(replica) => app.among(replica),
            None => app,
        });
        let sink: Arc<dyn Sink> = app.clone();
        let labels = NodeLabels { pool: app.config.pool_label.clone(), domain: String::new() };
        let running = loops::start(&app);
        Self {
            life,
            pods: PodWatch::new(Arc::clone(&ledger), Arc::clone(&sink), clock),
            nodes: NodeWatch::new(ledger, sink, labels),
            app,
            seen: 0,
            nodes_seen: 0,
            is_listed: false,
            is_list_due: true,
            is_frozen: false,
            thawed: 0,
            left: None,
            stopping_since: None,
            under_way: 0,
            inbox: Vec::new(),
            is_watch_due: false,
            is_nodes_due: false,
            next_due: None,
            was_ready: false,
            checked: 0,
            calls: BTreeMap::new(),
            open_calls: BTreeMap::new(),
            passed: BTreeMap::new(),
            unfiltered: BTreeSet::new(),
            holds: BTreeMap::new(),
            devices: VecDeque::new(),
            idle: (0, 0),
            sessions: BTreeMap::new(),
            heard: BTreeMap::new(),
            owners: BTreeMap::new(),
            last: BTreeMap::new(),
            shown: BTreeMap::new(),
            lists: Lists::new(),
            sampled: BTreeMap::new(),
            eras: BTreeMap::new(),
            starts: SeenStarts::default(),
            works: SeenWorks::default(),
            named: BTreeMap::new(),
            old: BTreeSet::new(),
            frozen: 0,
            stuck_until: 0,
            deaf_until: 0,
            stood: BTreeSet::new(),
            unkept: None,
            started: now,
            time,
            running,
        }
    }

    /// The API server has just answered a call that no step sends: of a watch.
    pub(super) fn hear_date(&self, now: u64) {
        let head = Head { status: 200, date: Some(api_seconds(now)) };
        self.app.outside.api_server().answered(self.app.clock.now(), head);
    }

    /// How it names itself in what it writes; `None` before it leads.
    pub(super) fn maker(&self) -> Option<FenceWriter> {
        self.app.writer.term().writer()
    }

    /// Whether its term has not ended.
    pub(super) fn may_write(&self) -> bool {
        self.app.writer.term().is_valid()
    }

    /// The process sees this time from now on.
    pub(super) fn set_time(&self, now: u64) {
        self.time.set(Timestamp::from_millis(now - self.started));
    }

    /// Sets the wall clock of the process forward by this many seconds, or back.
    pub(super) fn step_wall(&self, seconds: i64) {
        self.time.step_wall(seconds);
    }

    pub(super) fn step(&self, event: StepEvent, now: u64) -> Vec<Action> {
        self.set_time(now);
        self.app.outside.step(event, Timestamp::from_millis(now - self.started))
    }

    /// When its next timer is due.
    pub(super) fn due(&self) -> Option<u64> {
        self.app.outside.due().map(|due| self.started + due.millis())
    }

    /// Whether it knows that the pod is bound.
    pub(super) fn confirms(&self, uid: &str) -> bool {
        let held = self.app.ledger.reservation(&PodUid::new(uid));
        held.is_some_and(|held| held.state == ReservationState::Confirmed)
    }

    /// The ended pods of a node whose devices are not free yet.
    pub(super) fn draining(&self, name: &str) -> Vec<String> {
        let mut drains = Vec::new();
        self.app.ledger.look_at_each(|node| {
            let held = node.reservations().iter().filter(|_| node.name().as_str() == name);
            let held = held.filter(|(_, it)| matches!(it.state, ReservationState::Draining { .. }));
            drains.extend(held.map(|(uid, _)| uid.as_str().to_owned()));
        });
        drains
    }

    /// Notes which processes a report shows that was sent then.
    pub(super) fn note_shown(&mut self, report: &str, sent: u64, now: u64) {
        let report: Value = serde_json::from_str(report).unwrap_or_default();
        for device in report["devices"].as_array().into_iter().flatten() {
            let id = device["id"].as_str().unwrap_or_default();
            let newest = self.sampled.entry(id.to_owned()).or_default();
            *newest = sent.max(*newest);
            let Some(processes) = device["processes"].as_array() else { continue };
            let pods = processes.iter().filter_map(|process| process["podUid"].as_str());
            let pods: BTreeSet<&str> = pods.collect();
            self.shown.retain(|(uid, on), _| on != id || pods.contains(&**uid));
            for uid in pods {
                self.shown.entry((uid.to_owned(), id.to_owned())).or_insert(now);
            }
        }
    }

    /// Whether one of its loops has panicked.
    pub(super) fn has_failed(&mut self) -> bool {
        self.running.failed().now_or_never().is_some()
    }
}

impl Drop for Replica {
    /// The process dies.
    fn drop(&mut self) {
        self.app.outside.stop();
    }
}
