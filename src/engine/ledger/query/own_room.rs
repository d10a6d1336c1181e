//! The nodes as a pod that waits sees them: what is kept for the pod itself is free to it. So it is in
//! every answer about the pod, or its own room would count as taken from it.

use std::collections::BTreeMap;

use crate::ledger::nodes::state::Ledger;
use crate::ledger::query::queries::{NodeAnswer, PlacementRequest, evaluate};
use crate::ledger::query::team_limit::PodInNamespace;
use crate::model::node_state::NodeState;
use crate::model::rejection::Rejection;
use wire::ids::{NodeName, PodUid};

/// The nodes where something is kept for a pod, each as if that were free.
#[derive(Debug, Default)]
pub struct OwnRoom {
    nodes: BTreeMap<NodeName, NodeState>,
}

impl OwnRoom {
    /// Whether nothing is kept for the pod.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// The state of a node for the pod; `None` where nothing is kept for it.
    pub(crate) fn on(&self, node: &NodeName) -> Option<&NodeState> {
        self.nodes.get(node)
    }

    /// The nodes.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = &NodeState> {
        self.nodes.values()
    }
}

/// How all nodes answer, counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outlook {
    /// The nodes that fit.
    pub fitting: usize,
    /// The fewest containers that are restarted on one of these, because they borrow its room.
    pub restarts: usize,
    /// The others, by what each says.
    pub rejections: BTreeMap<Rejection, usize>,
}

impl Outlook {
    /// Counts these answers.
    pub fn of<'a>(answers: impl IntoIterator<Item = &'a NodeAnswer>) -> Self {
        let (mut outlook, mut restarts) = (Self::default(), None);
        for answer in answers {
            match answer {
                Ok(cost) => {
                    let own = cost.ties().restarts();
                    restarts = Some(restarts.map_or(own, |least: usize| least.min(own)));
                    outlook.fitting += 1;
                }
                Err(rejection) => *outlook.rejections.entry(*rejection).or_default() += 1,
            }
        }
        Self { restarts: restarts.unwrap_or_default(), ..outlook }
    }

    /// How many nodes there are.
    pub fn nodes(&self) -> usize {
        self.fitting + self.rejections.values().sum::<usize>()
    }

    /// The rejection that the smallest change would cure, and how many nodes say so.
    pub fn closest(&self) -> Option<(Rejection, usize)> {
        let rejections = self.rejections.iter().map(|(rejection, nodes)| (*rejection, *nodes));
        rejections.max_by_key(|(rejection, _)| rejection.closeness())
    }
}

impl Ledger {
    /// The room that is kept for a pod that waits, or where it is being bound.
    pub fn own_room(&self, uid: &PodUid) -> OwnRoom {
        if !self.pods.contains_key(uid) && !self.holds.contains_key(uid) && !self.has_standing(uid)
        {
            return OwnRoom::default(); // most pods
        }
        let _stays = self.stay();
        let bound_at = self.pods.get(uid).map(|at| *at);
        let held_at = self.holds.get(uid).map(|at| *at);
        let kept_at = self.standing.lock().get(uid).copied();
        let mut nodes = BTreeMap::new();
        for at in bound_at.into_iter().chain(held_at).chain(kept_at) {
            let mut node_state = self.node_entry(at).read().clone();
            node_state.stand_down(uid);
            node_state.release(uid);
            node_state.remove(uid);
            nodes.insert(node_state.name().clone(), node_state);
        }
        OwnRoom { nodes }
    }

    /// The answer of each of `nodes` to a pod that waits, in their order: with its own room, and with what
    /// its team may have.
    pub fn answers_to(
        &self,
        pod: PodInNamespace<'_>,
        query: &PlacementRequest,
        nodes: &[impl AsRef<str>],
    ) -> Vec<NodeAnswer> {
        let own = self.own_room(pod.uid);
        let mut answers = self.answers(query, nodes);
        for node_state in own.nodes() {
            let name = node_state.name().as_str();
            let here = nodes.iter().zip(&mut answers).filter(|(node, _)| node.as_ref() == name);
            here.for_each(|(_, answer)| *answer = self.answer_in(node_state, query));
        }
        self.limit_to_team(pod, query, nodes, &mut answers);
        answers
    }

    /// The same of all nodes, counted, in no time where they did not change: O(nodes).
    pub fn outlook(&self, pod: PodInNamespace<'_>, query: &PlacementRequest) -> Outlook {
        let own = self.own_room(pod.uid);
        let (mut names, mut answers) = (Vec::new(), Vec::new());
        let is_near_limit = self.is_near_limit(pod, query);
        self.look_at_answers(query, |node, answer| {
            let depends = own.on(node).is_some() || is_near_limit && answer.is_ok();
            match depends {
                true => names.push(node.clone()),
                false => answers.push(answer),
            }
        });
        let names: Vec<&str> = names.iter().map(NodeName::as_str).collect();
        answers.extend(self.answers_to(pod, query, &names));
        Outlook::of(&answers)
    }

    /// Says of nodes where room is kept for a pod why they refuse it, as if that room were free.
    pub fn refuse_with_own(
        &self,
        uid: &PodUid,
        query: &PlacementRequest,
        nodes: &[impl AsRef<str>],
        answers: &mut [NodeAnswer],
    ) {
        for node_state in self.own_room(uid).nodes() {
            let name = node_state.name().as_str();
            let here = nodes.iter().zip(answers.iter_mut());
            for (_, answer) in here.filter(|(node, known)| node.as_ref() == name && known.is_err())
            {
                // Whether it may go there is asked before.
                *answer = self.answer_in(node_state, query).and(*answer);
            }
        }
    }

    /// The answer of one state of a node.
    fn answer_in(&self, node_state: &NodeState, query: &PlacementRequest) -> NodeAnswer {
        let cluster = self.cluster(); // later than the copy: it knows all classes of it
        let compiled = query.compile(&cluster.classes);
        let place = evaluate(node_state, &compiled, query, &cluster)?;
        Ok(place.local_cost.cost(&self.prices(&cluster.compiled, query)))
    }
}
