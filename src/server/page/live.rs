//! The content of the page, kept up to date for all browsers together: each node's cell as JSON
//! with the number of its last change. A browser gets what is newer than the last number it has. So
//! nothing is queued for a slow browser: it gets more at a time, at most everything once.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use serde_json::value::RawValue;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use crate::http::listener_limits::{Clients, Connection, ListenerLimits};
use crate::page::cells::{Legend, Sight, node_cell};
use crate::page::summary::{ageless, figures, kept_rooms_of, teams_of, waiting_of};
use crate::page::trend::{POINT_EVERY, Trend, point};
use crate::views::viewer::Viewer;
use control::shared::app::App;
use engine::model::node_state::NodeState;
use engine::usage::node_details::NodeDetails;
use kube_api::protocol::messages::to_json;
use runtime::clock::Clock;
use wire::api::kind::{ApiVersion, SummaryDeltaKind, SummaryKind};
use wire::api::page::{Figures, GpuCell, NodeCell, Summary, SummaryDelta, TenantCell};
use wire::ids::NodeName;
use wire::units::Timestamp;

/// Time between two checks for changes while a browser listens, and between two of its deltas.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Time between two updates of the figures, which cost more than the changes.
const FIGURES_EVERY: Duration = Duration::from_secs(1);

/// Time between two walks over all nodes. Facts that affect no answer to a request (memory in use,
/// verified isolation) are no change of the ledger. The page shows them after at most this time.
const SWEEP_EVERY: Duration = Duration::from_secs(10);

/// Browsers that listen at a time. Each costs a connection, a task, and one message in memory.
const MAX_STREAMS: usize = 64;

/// Names kept of namespaces, models and nodes that may be gone. Above this number the map starts
/// again, and every browser reloads it.
const MAX_NAMES: usize = 20_000;

/// The content of the page.
pub struct Live {
    started: u64,
    map: Mutex<FleetMap>,
    news: watch::Sender<u64>,
    streams: Arc<Clients>,
    is_closed: watch::Sender<bool>,
}

/// The fleet as browsers have it.
#[derive(Default)]
struct FleetMap {
    /// How often the map has started again.
    generation: u64,
    /// Number of the newest change.
    number: u64,
    /// The version of the ledger up to which changes were seen.
    seen: u64,
    swept: Option<Timestamp>,
    legend: Legend,
    /// By node name: the number of its last change, and its cell; `None` if the node is gone.
    nodes: BTreeMap<String, (u64, Option<Box<RawValue>>)>,
    figures: Figures,
    /// The figures without ages for comparison, the number of their last change, and their time.
    figures_seen: (Vec<u8>, u64, Option<Timestamp>),
    trend: Trend,
}

/// News for a browser that has everything up to some snapshot.
pub(crate) enum News {
    Nothing,
    /// What is newer, as JSON, and the name of the snapshot to which it leads.
    Delta(Vec<u8>, String),
    /// Its snapshot is of another process, or of an earlier map: it needs a fresh one.
    Reload,
}

impl Live {
    /// Empty content.
    pub fn new(clock: &Clock) -> Self {
        Self {
            started: clock.unix_seconds(),
            map: Mutex::default(),
            news: watch::Sender::new(0),
            streams: Clients::new(ListenerLimits::new(MAX_STREAMS, 0)),
            is_closed: watch::Sender::new(false),
        }
    }

    /// Ends all streams, so that the shutdown does not wait for them.
    pub fn close(&self) {
        self.is_closed.send_replace(true);
    }

    /// A place to listen, for which the address with most may lose its oldest one; `None` if the
    /// service stops.
    pub(crate) fn listen(&self, from: IpAddr) -> Option<Arc<Connection>> {
        self.streams.admit(from).filter(|_| !*self.is_closed.borrow())
    }

    /// Grows with each change.
    pub(crate) fn news(&self) -> watch::Receiver<u64> {
        self.news.subscribe()
    }

    /// Becomes true when the service stops.
    pub(crate) fn closing(&self) -> watch::Receiver<bool> {
        self.is_closed.subscribe()
    }

    fn has_listeners(&self) -> bool {
        self.streams.is_used()
    }

    /// The map. A panic while it is locked leaves at worst an old cell.
    fn map(&self) -> MutexGuard<'_, FleetMap> {
        self.map.lock()
    }

    /// The name of the newest snapshot: process, generation, what the viewer sees, number.
    fn name(&self, map: &FleetMap, viewer: &Viewer) -> String {
        let (process, tag) = (std::process::id(), viewer.tag());
        format!("{:x}-{process:x}-{}-{tag}.{}", self.started, map.generation, map.number)
    }

    /// Brings the map in line with the ledger: O(changed nodes), sometimes O(nodes).
    pub(crate) fn refresh(&self, app: &App) {
        let mut map = self.map();
        let before = map.number;
        map.refresh(app);
        if map.number != before {
            self.news.send_replace(map.number);
        }
    }

    fn add_point(&self, app: &App) {
        let mut map = self.map();
        map.number += 1;
        let number = map.number;
        map.trend.add(number, point(app));
        self.news.send_replace(number);
    }

    /// Everything as JSON, and the name of that snapshot: O(nodes).
    pub(crate) fn snapshot(&self, app: &App, viewer: &Viewer) -> (Vec<u8>, String) {
        self.refresh(app);
        let map = self.map();
        let seen = SeenMap::of(app, &map, viewer);
        let snapshot = Summary {
            api_version: ApiVersion::default(),
            kind: SummaryKind::default(),
            version: Cow::Borrowed(env!("CARGO_PKG_VERSION")),
            at: self.name(&map, viewer),
            unix_seconds: app.clock.unix_seconds(),
            figures: seen.figures(),
            trend: map.trend.after(0),
            models: map.legend.models.all(),
            namespaces: map
                .legend
                .namespaces
                .all()
                .into_iter()
                .map(|name| seen.name(name))
                .collect(),
            nodes: seen.cells(map.nodes.values().filter_map(|(_, cell)| cell.as_deref())),
        };
        (to_json(&snapshot), snapshot.at)
    }

    /// What is newer than the snapshot `after`: O(nodes).
    pub(crate) fn since(&self, app: &App, after: &str, viewer: &Viewer) -> News {
        let map = self.map();
        let at = self.name(&map, viewer);
        if at == after {
            return News::Nothing;
        }
        let (Some((known, number)), Some((now, _))) = (after.rsplit_once('.'), at.rsplit_once('.'))
        else {
            return News::Reload;
        };
        let number = number.parse::<u64>().ok().filter(|number| *number <= map.number);
        let Some(number) = number.filter(|_| known == now) else { return News::Reload };
        let seen = SeenMap::of(app, &map, viewer);
        let fresh = || map.nodes.iter().filter(|(_, (changed, _))| *changed > number);
        let delta = SummaryDelta {
            api_version: ApiVersion::default(),
            kind: SummaryDeltaKind::default(),
            at: at.clone(),
            unix_seconds: app.clock.unix_seconds(),
            figures: (map.figures_seen.1 > number).then(|| seen.figures()),
            trend: map.trend.after(number),
            models: map.legend.models.after(number),
            namespaces: map
                .legend
                .namespaces
                .after(number)
                .into_iter()
                .map(|(at, name)| (at, seen.name(name)))
                .collect(),
            nodes: seen.cells(fresh().filter_map(|(_, (_, cell))| cell.as_deref())),
            gone: fresh()
                .filter(|(_, (_, cell))| cell.is_none())
                .map(|(name, _)| Cow::Borrowed(name.as_str()))
                .collect(),
        };
        News::Delta(to_json(&delta), at)
    }
}

/// The map as a viewer sees it.
struct SeenMap<'a> {
    app: &'a App,
    map: &'a FleetMap,
    viewer: &'a Viewer,
    /// Positions of the namespaces that the viewer does not see.
    hidden: BTreeSet<usize>,
}

impl<'a> SeenMap<'a> {
    fn of(app: &'a App, map: &'a FleetMap, viewer: &'a Viewer) -> Self {
        let names = map.legend.namespaces.all().into_iter().enumerate();
        let hidden = names.filter(|(_, name)| !viewer.sees(name)).map(|(at, _)| at).collect();
        Self { app, map, viewer, hidden }
    }

    fn figures(&self) -> Cow<'a, Figures> {
        let mut figures = Cow::Borrowed(&self.map.figures);
        if *self.viewer != Viewer::All {
            figures.to_mut().waiting_pods = waiting_of(self.app, self.viewer);
            figures.to_mut().kept_rooms = kept_rooms_of(self.app, self.viewer);
            figures.to_mut().teams = teams_of(self.app, self.viewer);
        }
        figures
    }

    fn name(&self, name: Cow<'a, str>) -> Cow<'a, str> {
        if self.viewer.sees(&name) { name } else { Cow::Borrowed("") }
    }

    fn cells(&self, cells: impl Iterator<Item = &'a RawValue>) -> Vec<Cow<'a, RawValue>> {
        cells.map(|cell| self.cell(cell)).collect()
    }

    /// The cell, in which tenants of other namespaces have none.
    fn cell(&self, cell: &'a RawValue) -> Cow<'a, RawValue> {
        if self.hidden.is_empty() {
            return Cow::Borrowed(cell);
        }
        let mut node: NodeCell = serde_json::from_str(cell.get()).expect("a cell of ours");
        for TenantCell(tenant) in node.gpus.iter_mut().flat_map(|GpuCell(gpu)| &mut gpu.4) {
            tenant.0 = tenant.0.filter(|position| !self.hidden.contains(position));
        }
        let cell = serde_json::value::to_raw_value(&node);
        Cow::Owned(cell.expect("cells are made of texts and numbers"))
    }
}

impl FleetMap {
    fn refresh(&mut self, app: &App) {
        if self.is_overgrown() {
            self.start_over();
        }
        let (now, next) = (app.clock.now(), self.number + 1);
        let is_sweep = is_due(self.swept, SWEEP_EVERY, now);
        let (mut seen, mut is_news) = (self.seen, false);
        let mut there = BTreeSet::new();
        let look = |node: &NodeState, details: &NodeDetails| {
            if is_sweep {
                there.insert(node.name().clone());
            }
            is_news |= self.take(app, node, details, next);
        };
        if is_sweep {
            app.ledger.look_into_each(look);
        } else {
            app.ledger.look_into_changed(&mut seen, look);
        }
        if is_sweep {
            self.swept = Some(now);
            is_news |= self.lose_others(&there, next);
        }
        self.seen = seen;
        if is_due(self.figures_seen.2, FIGURES_EVERY, now) {
            self.figures = figures(app);
            let ageless = ageless(&mut self.figures);
            if ageless != self.figures_seen.0 {
                (self.figures_seen.0, self.figures_seen.1) = (ageless, next);
                is_news = true;
            }
            self.figures_seen.2 = Some(now);
        }
        self.number += u64::from(is_news);
    }

    /// Notes that nodes which the ledger has forgotten are gone. Returns whether there are any.
    fn lose_others(&mut self, there: &BTreeSet<NodeName>, next: u64) -> bool {
        let shown = self.nodes.iter_mut().filter(|(_, (_, cell))| cell.is_some());
        let gone = shown.filter(|(name, _)| !there.contains(&NodeName::new(name.as_str())));
        gone.map(|(_, known)| *known = (next, None)).count() > 0
    }

    /// Takes in a node under the number `next`. Returns whether its cell changed.
    fn take(&mut self, app: &App, node: &NodeState, details: &NodeDetails, next: u64) -> bool {
        let known = self.nodes.get(node.name().as_str()).and_then(|(_, cell)| cell.as_deref());
        if node.is_forgettable() {
            let is_news = known.is_some();
            if is_news {
                self.nodes.insert(node.name().to_string(), (next, None));
            }
            return is_news;
        }
        let limits = app.config.webhook.memory_limit.driver_limits();
        let mut sight = Sight { details, limits, legend: &mut self.legend, number: next };
        let cell = serde_json::value::to_raw_value(&node_cell(node, &mut sight));
        let cell = cell.expect("cells are made of texts and numbers");
        let is_news = known.is_none_or(|known| known.get() != cell.get());
        if is_news {
            self.nodes.insert(node.name().to_string(), (next, Some(cell)));
        }
        is_news
    }

    /// Whether the map keeps too many names of what may be gone.
    fn is_overgrown(&self) -> bool {
        let gone = self.nodes.values().filter(|(_, cell)| cell.is_none()).count();
        let names = self.legend.models.count() + self.legend.namespaces.count();
        gone.max(names) > MAX_NAMES
    }

    fn start_over(&mut self) {
        let mut trend = std::mem::take(&mut self.trend);
        trend.retell(1);
        *self = Self { generation: self.generation + 1, number: 1, trend, ..Self::default() };
    }
}

fn is_due(last: Option<Timestamp>, every: Duration, now: Timestamp) -> bool {
    last.is_none_or(|last| now.since(last) >= every)
}

/// Checks for changes while browsers listen, and adds points to the trend.
pub async fn run(app: &Arc<App>, live: &Arc<Live>) {
    let mut tick = tokio::time::interval(LOOK_EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut pointed: Option<Timestamp> = None;
    loop {
        tick.tick().await;
        let now = app.clock.now();
        let is_point_due = is_due(pointed, POINT_EVERY, now);
        if is_point_due {
            pointed = Some(now);
        }
        if is_point_due || live.has_listeners() {
            let (app, live) = (Arc::clone(app), Arc::clone(live));
            let looked = tokio::task::spawn_blocking(move || {
                if is_point_due {
                    live.add_point(&app);
                }
                if live.has_listeners() {
                    live.refresh(&app);
                }
            });
            if let Err(fault) = looked.await {
                tracing::error!(%fault, "the page could not be brought up to date");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_crowd_of_browsers_gives_way_to_another_address() {
        let live = Live::new(&Clock::start());
        let from = |last| IpAddr::from([10, 0, 0, last]);
        let crowd: Vec<_> = (0..MAX_STREAMS).map(|_| live.listen(from(9)).unwrap()).collect();
        let other = live.listen(from(1)).expect("a place");
        let waits = std::future::pending::<()>();
        assert!(crowd[0].unless_closed(waits).await.is_none(), "the oldest one gave way");
        drop((crowd, other));
        assert!(!live.has_listeners());
        live.close();
        assert!(live.listen(from(1)).is_none());
    }
}
