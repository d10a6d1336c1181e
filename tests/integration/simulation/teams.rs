//! What is promised of teams with shares, in the runs that have them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use engine::model::reservation::{Reservation, ReservationState};
use engine::model::team::TeamShare;
use kube_api::config::file::Config;
use kube_api::config::pods::quota::SharesConfig;
use kube_api::request::room_note::RoomNote;
use wire::units::{MemMib, Share};

use super::replica::Replica;
use super::{GPU_MIB, World};

/// The namespaces of pods, each a team; without shares the first alone.
pub(super) const TEAMS: [&str; 3] = ["team", "red", "blue"];

/// What is guaranteed to them, and the most, in millionths of a GPU. There are about eight GPUs.
const SHARES: [(u64, Option<u64>); 3] =
    [(0, None), (2_000_000, Some(3_000_000)), (1_000_000, None)];

/// A decision, and what it orders, may be this much older than what it is compared with.
const LATELY: u64 = 15_000;

/// Gives the teams their shares.
pub(super) fn configure(config: &mut Config) {
    let share = |(team, (guaranteed, at_most)): (&str, (u64, Option<u64>))| {
        let share = TeamShare {
            guaranteed: Share::from_millionths(guaranteed),
            at_most: at_most.map(Share::from_millionths),
        };
        (team.to_owned(), share)
    };
    config.quota.reference = MemMib::new(GPU_MIB);
    config.shares = SharesConfig::of(TEAMS.into_iter().zip(SHARES).map(share));
}

/// When each pod was over the quota of its team, as a process that leads knew.
pub(super) type OverLately = BTreeMap<String, u64>;

impl World {
    /// No team has more than it may have, as far as the API server knows.
    pub(super) fn check_limits(&self) -> Result<(), String> {
        for (team, (_, at_most)) in TEAMS.into_iter().zip(SHARES) {
            let pods =
                self.api.pods.iter().filter(|(_, pod)| pod.is_placed() && pod.of.team == team);
            // At least this counts: of a larger GPU the same share has more memory.
            let parts = pods.clone().flat_map(|(_, pod)| &pod.takes);
            let used: u64 = parts.map(|(_, _, share)| share).sum();
            if at_most.is_some_and(|most| used > most) {
                let pods: Vec<&String> = pods.map(|(uid, _)| uid).collect();
                return Err(format!("team {team} has {used} millionths of a GPU: {pods:?}"));
            }
        }
        Ok(())
    }

    /// Notes which pods are over the quota of their team now, for processes that lead.
    pub(super) fn note_over_quota(&mut self) {
        let leading = self.replicas.iter().flatten().chain(&self.overlapping);
        let leading = leading.filter(|replica| replica.app.lead.leading.is_here());
        let over: BTreeSet<String> = leading.flat_map(over_quota).collect();
        self.over_lately.extend(over.into_iter().map(|uid| (uid, self.now)));
    }

    /// Notes which pods are to go for one of another team: only those over the quota of theirs may.
    pub(super) fn note_victims(&mut self, holder: &str, note: Option<&RoomNote>) {
        let victims = note.into_iter().flat_map(|note| &note.victims).map(ToString::to_string);
        let victims: Vec<String> = victims.filter(|_| self.settings.has_teams).collect();
        if !victims.is_empty() {
            self.note_over_quota(); // what the process has learnt since the last look
        }
        for victim in victims {
            match self.is_owed(&victim, holder) {
                Some(true) => self.preempted.owe(&victim),
                Some(false) => {
                    self.broke(format!("{victim} of another team is to go for {holder}"));
                }
                None => {}
            }
        }
    }

    /// Whether a pod may be a victim for another one, by their teams; `None` if priority decides.
    pub(super) fn is_owed(&self, victim: &str, holder: &str) -> Option<bool> {
        let team = |uid: &str| self.api.pods.get(uid).map(|pod| pod.of.team);
        let has_gpu = self.api.pods.get(victim).is_some_and(|pod| !pod.takes.is_empty());
        let (own, other) = (team(victim)?, team(holder)?);
        let is_over = || self.over_lately.get(victim).is_some_and(|at| self.now < at + LATELY);
        (has_gpu && own != other).then(is_over)
    }
}

/// The pods that do not fit into what is guaranteed to their teams, from the reservations alone.
fn over_quota(replica: &Replica) -> BTreeSet<String> {
    let mut teams: BTreeMap<String, Vec<(Reservation, u64)>> = BTreeMap::new();
    let prices = &replica.app.request_rules.prices;
    for node in replica.app.ledger.nodes() {
        for held in node.reservations().values() {
            let capacity = |id| {
                let mut devices = node.devices().iter();
                devices.find(|device| device.device().id == id).map(|it| it.capacity().memory.mib())
            };
            let placed = held.placement.devices.iter().map(|placed| {
                let (mib, share) = (placed.demand.memory.mib(), placed.demand.share.millionths());
                capacity(placed.id.clone()).map_or(share, |whole| {
                    let part = |mib: u64| mib * 1_000_000 / whole.max(1);
                    // The memory of a share is rounded up.
                    let is_of_share = part(mib.saturating_sub(1)) < share;
                    if is_of_share { share } else { share.max(part(mib)).min(1_000_000) }
                })
            });
            let charge = held.request.as_ref().map_or(0, |it| prices.charge(it).equivalents);
            let counted = (held.clone(), charge.max(placed.sum()));
            teams.entry(held.pod.namespace().to_owned()).or_default().push(counted);
        }
    }
    let mut over = BTreeSet::new();
    for (team, mut pods) in teams {
        let order = |held: &Reservation| {
            let is_draining = matches!(held.state, ReservationState::Draining { .. });
            let tenure = held.tenure.filter(|tenure| !tenure.is_ending && !is_draining);
            let order = tenure.map(|it| (Reverse(it.priority), it.started_unix_seconds));
            (order.is_none(), order, held.pod.uid.clone())
        };
        pods.sort_by_cached_key(|(held, _)| order(held));
        let shares = TEAMS.into_iter().zip(SHARES);
        let mut left = shares.filter(|(name, _)| *name == team).map(|(_, it)| it.0).sum::<u64>();
        for (held, charge) in pods {
            match left.checked_sub(charge) {
                Some(rest) => left = rest,
                None => _ = over.insert(held.pod.uid.as_str().to_owned()),
            }
        }
    }
    over
}
