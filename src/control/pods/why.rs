//! Why a pod waits now: the one answer. Events, `/v1/explain`, `/v1/waiting`, the page and the command
//! line all tell what is found here, and *filter* refuses by it.

use std::collections::BTreeMap;

use crate::pods::group_state::{GroupState, Groups};
use crate::pods::wording;
use crate::pods::wording::{
    BEING_BOUND, FITS_NOW, GATED, NOT_REFUSED, Profiles, gpus, with_suggestions,
};
use crate::shared::app::App;
use engine::ledger::query::own_room::Outlook;
use engine::ledger::query::queries::PlacementRequest;
use engine::ledger::query::team_limit::PodInNamespace;
use engine::ledger::suggest::search::{Change, Suggestion};
use engine::ledger::suggest::standing::Standing;
use engine::ledger::suggest::waiting::{WaitingPod, WaitingState};
use engine::model::rejection::Rejection;
use engine::model::request::PodGroup;
use engine::model::reservation::PodRef;
use kube_api::write::events::NoticeReason;
use wire::api::page::KeptReason;
use wire::api::waiting::Obstacle;
use wire::ids::PodUid;
use wire::mutation::{Mutation, mutated};
use wire::units::Share;

/// Most different requests for which one list looks at all nodes. Pods with other ones learn what
/// their last call found.
const MOST_REQUESTS: usize = 20;

/// Which of the ledger's suggestions let the pod start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Helps {
    /// None of them.
    Nothing,
    Requests,
    All,
}

/// Why a pod waits.
#[derive(Clone, Debug)]
pub struct Why {
    /// What is in its way.
    pub obstacle: Obstacle,
    /// The same in a few words without numbers, as kube-scheduler shows it.
    pub reason: String,
    /// What is missing, with its amount; empty if nothing is.
    pub missing: String,
    pub nodes: usize,
    pub verdict: String,
    /// What nodes say, where that is why it waits.
    rejections: BTreeMap<Rejection, usize>,
    /// What its owner can do about it, beside what the ledger suggests.
    of_owner: Option<String>,
    /// What an operator could do something about.
    of_operator: Vec<Rejection>,
    helps: Helps,
}

impl Why {
    /// An answer in which nodes do not matter.
    fn plain(obstacle: Obstacle, reason: &str, verdict: String) -> Self {
        Self {
            obstacle,
            reason: reason.to_owned(),
            missing: String::new(),
            nodes: 0,
            verdict,
            rejections: BTreeMap::new(),
            of_owner: None,
            of_operator: Vec::new(),
            helps: Helps::Nothing,
        }
    }

    /// Of a pod for which no call was answered, where nothing else is known.
    fn not_called() -> Self {
        Self::plain(Obstacle::KubeScheduler, NOT_REFUSED, NOT_REFUSED.to_owned())
    }

    /// What is said of it everywhere, of a pod that waits for this wherever it fits.
    fn everywhere(rejection: Rejection, outlook: &Outlook, verdict: String) -> Self {
        let missing = verdict.clone();
        let plain = Self::plain(rejection.obstacle(), rejection.reason(), verdict);
        Self { missing, nodes: outlook.nodes(), ..plain }
    }

    /// Of a pod that waits for the nodes: what they say.
    fn of_nodes(outlook: &Outlook) -> Self {
        let (fitting, nodes) = (outlook.fitting, outlook.nodes());
        let closest = outlook.closest();
        let verdict = wording::verdict(fitting, nodes, closest.map(|(rejection, _)| rejection));
        let Some((rejection, refusing)) = closest.filter(|_| fitting == 0) else {
            if fitting == 0 {
                return Self::plain(Obstacle::Node, &verdict.clone(), verdict);
            }
            let verdict = verdict + &wording::restarts(outlook.restarts);
            return Self::plain(Obstacle::KubeScheduler, FITS_NOW, verdict);
        };
        Self {
            missing: rejection.missing(),
            nodes: refusing,
            rejections: outlook.rejections.clone(),
            of_operator: outlook.rejections.keys().copied().collect(),
            helps: Helps::All,
            ..Self::plain(rejection.obstacle(), rejection.reason(), verdict)
        }
    }

    /// Whether a search for suggestions may find some.
    pub fn is_helped(&self) -> bool {
        self.helps != Helps::Nothing
    }

    /// Whether pods that end or move could let it start.
    pub fn is_helped_by_room(&self) -> bool {
        self.helps == Helps::All
    }

    /// What would help, the cheapest first: of what the ledger `found`, what is true of this pod.
    pub fn suggestions(
        &self,
        app: &App,
        pod: &WaitingPod,
        profiles: &Profiles<'_>,
        mut found: Vec<Suggestion>,
        sees: &dyn Fn(&str) -> bool,
    ) -> Vec<String> {
        found.retain(|suggestion| {
            self.is_true(app, pod, suggestion) && app.may_do(&pod.namespace, suggestion)
        });
        let of_operator = self.of_operator.iter().copied();
        let known = wording::suggestions(&pod.query, profiles, &found, of_operator, sees);
        self.of_owner.iter().cloned().chain(known).collect()
    }

    /// Whether the pod starts after this change, as far as gpupack decides it.
    fn is_true(&self, app: &App, pod: &WaitingPod, suggestion: &Suggestion) -> bool {
        let Change::Request(_, changed) = &suggestion.change else {
            return self.helps == Helps::All;
        };
        let named = PodInNamespace { uid: &pod.pod.uid, namespace: &pod.namespace };
        self.helps != Helps::Nothing
            && !app.is_at_team_limit(named, changed)
            && !app.ledger.is_limited_on(named, changed, suggestion.node.as_str())
    }

    /// All that fits into an event.
    pub(crate) fn sentence(&self, suggestions: &[String]) -> String {
        match self.rejections.is_empty() {
            true => with_suggestions(self.verdict.clone(), suggestions),
            false => wording::sentence(&self.rejections, suggestions),
        }
    }
}

impl App {
    /// Whether the team of a pod may not have what it requests.
    pub fn is_at_team_limit(&self, pod: PodInNamespace<'_>, query: &PlacementRequest) -> bool {
        let gpu = query.gpu.as_ref();
        let may_have =
            gpu.is_none_or(|gpu| self.ledger.teams.may_have(pod.uid, pod.namespace, gpu));
        !may_have && !mutated(Mutation::TeamLimitUnchecked)
    }

    /// Whether pods that are to go for this one are still there.
    pub fn has_victims(&self, uid: &PodUid) -> bool {
        self.room.preemptors.victims(uid).iter().any(|victim| self.ledger.has_pod(victim))
    }

    /// What a pod waits for wherever it fits.
    pub fn waits_for(
        &self,
        pod: PodInNamespace<'_>,
        group: Option<&PodGroup>,
        query: &PlacementRequest,
    ) -> Option<Rejection> {
        let uid = pod.uid;
        // Pods were asked to go for it: it goes nowhere else before all of that room is free.
        let waits_for_room = self.room.preemptors.is_asked(uid)
            && self.is_known_to_wait(uid, query)
            && self.ledger.standing(uid, query).is_some()
            && (self.has_victims(uid) || self.ledger.fits_in_room_of(uid, query, None).is_none());
        let waits_for_group = group.is_some() && !mutated(Mutation::GroupIgnored);
        match (waits_for_room, waits_for_group) {
            (true, _) => Some(Rejection::RoomElsewhere),
            (false, true) => Some(Rejection::GroupWaits),
            (false, false) => self.is_at_team_limit(pod, query).then_some(Rejection::TeamLimit),
        }
    }

    /// Why a pod waits, by what the nodes answer to it.
    pub fn why(&self, state: &WaitingState, outlook: &Outlook, groups: &Groups) -> Why {
        let (pod, query) = (&state.waiting, &state.waiting.query);
        let uid = &pod.pod.uid;
        let named = PodInNamespace { uid, namespace: &pod.namespace };
        if let Some(node) = self.ledger.assumed_on(uid, query) {
            let verdict = format!("{BEING_BOUND} to node {node}");
            return Why::plain(Obstacle::KubeScheduler, BEING_BOUND, verdict);
        }
        if self.pods.gated.contains_key(uid) {
            return Why::plain(Obstacle::KubeScheduler, GATED, GATED.to_owned());
        }
        let kept = kept_room(self, pod);
        let why = match self.waits_for(named, pod.group.as_ref(), query) {
            Some(Rejection::RoomElsewhere) => {
                let rejection = Rejection::RoomHere; // it is one place, whatever other nodes say
                let verdict = rejection.reason().to_owned();
                let helps = Helps::Requests;
                Why { helps, ..Why::everywhere(rejection, outlook, verdict) }
            }
            Some(Rejection::GroupWaits) => match groups.of_pod(pod) {
                Some(group) => self.why_group(pod, group, outlook),
                None => Why::of_nodes(outlook), // it has just got its place
            },
            Some(rejection) => {
                let verdict = self.of_team(pod);
                let (of_operator, helps) = (vec![rejection], Helps::Requests);
                Why { of_operator, helps, ..Why::everywhere(rejection, outlook, verdict) }
            }
            None => Why::of_nodes(outlook),
        };
        Why { verdict: why.verdict + &kept, ..why }
    }

    /// Why a pod of a group waits.
    fn why_group(&self, pod: &WaitingPod, group: &GroupState, outlook: &Outlook) -> Why {
        let rejection = Rejection::GroupWaits;
        if let Some(charge) = group.beyond_limit(self.ledger.teams.left(&pod.namespace)) {
            let verdict = self.of_team_and(&pod.namespace, &group.counts(charge));
            let of_operator = vec![Rejection::TeamLimit];
            let obstacle = Rejection::TeamLimit.obstacle();
            return Why { obstacle, of_operator, ..Why::everywhere(rejection, outlook, verdict) };
        }
        let verdict = group.verdict(&pod.pod.uid);
        let of_owner = group.suggestion();
        let of_group = Why { of_owner, ..Why::everywhere(rejection, outlook, verdict) };
        if outlook.fitting > 0 || !group.starts_alone(&pod.pod.uid) {
            return of_group;
        }
        // The others of its group have their places: only nodes are in its way.
        let of_nodes = Why::of_nodes(outlook);
        let verdict = format!("{}; {}", of_group.verdict, of_nodes.verdict);
        Why { verdict, ..of_nodes }
    }

    /// What is said of a pod whose team may not have what it requests.
    fn of_team(&self, pod: &WaitingPod) -> String {
        let charge = pod.query.gpu.as_ref().map(|gpu| self.ledger.teams.charge(gpu));
        let counts = format!("this pod counts {}: it waits", charge.unwrap_or(Share::ZERO));
        self.of_team_and(&pod.namespace, &counts)
    }

    fn of_team_and(&self, namespace: &str, counts: &str) -> String {
        let teams = &self.ledger.teams;
        let left = Share::from_millionths(teams.left(namespace).unwrap_or_default());
        let team = teams.team_of(namespace);
        format!(
            "its team `{team}` may have {} more, and {counts} until pods of the team end",
            gpus(left)
        )
    }
}

impl App {
    /// Tells a pod that room is kept for it from now on.
    pub(crate) fn tell_room_kept(&self, pod: &PodRef, standing: &Standing) {
        let lacks = wording::not_free(Share::from_millionths(standing.lacks));
        let note = format!(
            "it is the first of its line: what becomes free of its GPUs on node {} is kept for it; {lacks}",
            standing.node
        );
        self.tell(pod, NoticeReason::GpuRoomKept, note);
    }
}

/// What is said of room that is kept for a pod, as the end of a sentence.
fn kept_room(app: &App, pod: &WaitingPod) -> String {
    let Some(standing) = app.ledger.standing(&pod.pod.uid, &pod.query) else {
        return String::new();
    };
    let why = match kept_reason(app, pod) {
        KeptReason::PodsLeave => "other pods leave for it",
        KeptReason::FirstOfLine => "it is the first of its line",
        KeptReason::Group => "its group starts together",
    };
    let lacks = wording::not_free(Share::from_millionths(standing.lacks));
    format!("; {why}, and room is kept for it on node {}: {lacks}", standing.node)
}

/// Why room is kept for a pod.
pub fn kept_reason(app: &App, pod: &WaitingPod) -> KeptReason {
    match (&pod.group, app.room.preemptors.has(&pod.pod.uid)) {
        (Some(_), _) => KeptReason::Group,
        (None, true) => KeptReason::PodsLeave,
        (None, false) => KeptReason::FirstOfLine,
    }
}

/// Why each pod of a list waits. Pods with the same request are answered at once.
pub struct Whys<'a> {
    app: &'a App,
    groups: Groups,
    looked: BTreeMap<Line, Outlook>,
}

/// Pods to which every node gives the same answer: of one request, and of one namespace; or one pod with
/// room of its own.
type Line = (PlacementRequest, Option<String>, Option<PodUid>);

impl<'a> Whys<'a> {
    /// Of the current state.
    pub fn of(app: &'a App) -> Self {
        Self { app, groups: Groups::of(app), looked: BTreeMap::new() }
    }

    /// Why a pod waits, and whether the nodes were asked now.
    pub fn why(&mut self, state: &WaitingState) -> (Why, bool) {
        let (app, pod) = (self.app, &state.waiting);
        let uid = &pod.pod.uid;
        let own = (!app.ledger.own_room(uid).is_empty()).then(|| uid.clone());
        let team = app.ledger.teams.rules().map(|_| pod.namespace.clone());
        let line = (pod.query.clone(), team, own);
        let is_current = self.looked.contains_key(&line) || self.looked.len() < MOST_REQUESTS;
        if !is_current {
            let outlook = last_call(state);
            let why = app.why(state, &outlook, &self.groups);
            return match outlook.nodes() {
                0 if why.obstacle == Obstacle::Node => (Why::not_called(), false),
                _ => (why, false),
            };
        }
        let named = PodInNamespace { uid, namespace: &pod.namespace };
        let outlook = self.looked.entry(line);
        let outlook = outlook.or_insert_with(|| app.ledger.outlook(named, &pod.query));
        (app.why(state, outlook, &self.groups), true)
    }
}

/// What the nodes of the last call for a pod said, but for what it waits for wherever it fits.
fn last_call(state: &WaitingState) -> Outlook {
    let mut rejections = state.refused.clone().unwrap_or_default();
    rejections.retain(|rejection, _| !rejection.is_of_the_pod());
    Outlook { rejections, ..Outlook::default() }
}

impl App {
    /// Why one pod waits, by the current ledger.
    pub(crate) fn why_now(&self, state: &WaitingState) -> Why {
        let pod = &state.waiting;
        let named = PodInNamespace { uid: &pod.pod.uid, namespace: &pod.namespace };
        let outlook = self.ledger.outlook(named, &pod.query);
        self.why(state, &outlook, &Groups::around(self, pod))
    }
}
