//! Prometheus families. Labels are closed or bounded sets, never names of pods or texts of errors.
//! Series of closed sets exist with zero from the start.

use std::collections::BTreeMap;
use std::time::Duration;

use prometheus::{Encoder, Registry, TextEncoder};

use crate::metrics::demand::{AccountUse, DemandFamilies, QueueFigures, TeamFigures};
use crate::metrics::fleet::{FleetFamilies, FleetFigures};
use crate::metrics::guard::{
    BlindFigures, EvictionReason, EvictionResult, GuardFamilies, OutsideFigures,
};
use crate::metrics::labels::{
    BindResult, CertificateLabel, EditResult, Outcome, ReportResult, RequeueResult, Verb,
};
use crate::metrics::make::{Make, valid, whole};
use crate::metrics::mig::{FailedMigOrders, MakeResult, MigFamilies, MigFigures};
use crate::metrics::moves::{LentFigures, MoveFamilies, MoveReason, MoveResult};
use crate::metrics::service::{CallFamilies, NewsFamilies, ReplicaFamilies};
use engine::model::rejection::Rejection;
use wire::ids::MigProfile;

/// All families of the extender.
pub struct Metrics {
    registry: Registry,
    /// Of the cluster: only the replica that leads shows them, so that nothing counts twice.
    of_cluster: Registry,
    replica: ReplicaFamilies,
    calls: CallFamilies,
    news: NewsFamilies,
    fleet: FleetFamilies,
    demand: DemandFamilies,
    guard: GuardFamilies,
    moves: MoveFamilies,
    mig: MigFamilies,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Registers all families, each series at zero.
    ///
    /// # Panics
    /// Never: the names are constants, and a test registers them.
    pub fn new() -> Self {
        let (registry, of_cluster) = (Registry::new(), Registry::new());
        let (make, make_of_cluster) = (Make(&registry), Make(&of_cluster));
        let build = make.int_gauges(
            "gpupack_build_info",
            "1, with the version of the running program as label.",
            &["version", "component"],
        );
        build.with_label_values(&[env!("CARGO_PKG_VERSION"), "extender"]).set(1);
        let metrics = Self {
            fleet: FleetFamilies::new(&make_of_cluster),
            demand: DemandFamilies::new(&make_of_cluster),
            guard: GuardFamilies::new(&make_of_cluster),
            moves: MoveFamilies::new(&make_of_cluster),
            mig: MigFamilies::new(&make_of_cluster),
            replica: ReplicaFamilies::new(&make),
            calls: CallFamilies::new(&make, &make_of_cluster),
            news: NewsFamilies::new(&make),
            registry,
            of_cluster,
        };
        metrics.set_certificates(CertificateLabel::ALL.map(|label| (label, 0)));
        metrics
    }

    /// Counts what the watch of a resource received: a change, or a failure and a restart.
    pub fn watched(&self, resource: &'static str, is_failure: bool) {
        let kind = if is_failure { "failure" } else { "change" };
        self.news.watch_events.with_label_values(&[resource, kind]).inc();
    }

    /// Records the time from the post of a Binding until the watch showed the pod bound.
    pub fn watch_lagged(&self, lag: Duration) {
        self.news.watch_lag.observe(lag.as_secs_f64());
    }

    /// Records that a pod of a size was placed `after_seconds` after its creation.
    pub fn placed(&self, size: &'static str, after_seconds: u64) {
        self.demand.placed(size, after_seconds);
    }

    /// Adds what the pods of a namespace and priority class held and used since the last call.
    pub fn used(&self, namespace: &str, priority_class: &str, used: AccountUse) {
        self.demand.used(namespace, priority_class, used);
    }

    /// Records a call of a verb.
    pub fn verb(&self, verb: Verb, outcome: Outcome, took: Duration) {
        let labels = [verb.label(), outcome.label()];
        self.calls.verb_duration.with_label_values(&labels).observe(took.as_secs_f64());
    }

    /// Counts the nodes that *filter* refused by reason, in the order of [`Rejection::LABELS`].
    pub fn refused(&self, nodes: &[usize; Rejection::LABELS.len()]) {
        for (label, nodes) in Rejection::LABELS.iter().zip(nodes).filter(|(_, nodes)| **nodes > 0) {
            let nodes = u64::try_from(*nodes).unwrap_or(u64::MAX);
            self.calls.refusals.with_label_values(&[label]).inc_by(nodes);
        }
    }

    /// Counts a pod whose request is refused.
    pub fn refused_request(&self) {
        self.calls.refusals.with_label_values(&["bad_request"]).inc();
    }

    /// Counts the outcome of a bind.
    pub fn bind(&self, result: BindResult) {
        self.calls.binds.with_label_values(&[result.label()]).inc();
    }

    /// Sets the number of ended pods whose processes hold devices longer than `drain_seconds`.
    pub fn set_overdue_drains(&self, pods: usize) {
        self.guard.show_overdue_drains(pods);
    }

    /// Sets how many pods did not get their GPU, and how many nodes take no more for that.
    pub fn set_blind(&self, figures: BlindFigures) {
        self.guard.show_blind(figures);
    }

    /// Counts an edit of a placement by another client, or the outcome of writing it back.
    pub fn placement_edit(&self, result: EditResult) {
        self.guard.placement_edit(result);
    }

    /// Counts the outcome of a requeue.
    pub fn requeued(&self, result: RequeueResult) {
        self.calls.requeues.with_label_values(&[result.label()]).inc();
    }

    /// Counts a report.
    pub fn report(&self, result: ReportResult) {
        self.news.reports.with_label_values(&[result.label()]).inc();
    }

    /// Counts the faults that an audit of the ledger found.
    pub fn audited(&self, faults: usize) {
        self.replica.audit_failures.inc_by(u64::try_from(faults).unwrap_or(u64::MAX));
    }

    /// Sets the gauges of use beyond what is allocated.
    pub fn set_outside(&self, figures: OutsideFigures) {
        self.guard.show(figures);
    }

    /// Sets the number of tenants for which an isolation mode is configured, and is verified.
    pub fn set_tenants(&self, mode: &'static str, configured: u64, verified: u64) {
        self.guard.show_tenants(mode, configured, verified);
    }

    /// Counts the end of a move.
    pub fn moved(&self, reason: MoveReason, result: MoveResult) {
        self.moves.moved(reason, result);
    }

    /// How many moves have ended so.
    pub fn moves(&self, reason: MoveReason, result: MoveResult) -> u64 {
        self.moves.count(reason, result)
    }

    /// Notes how long a bind waited for guests.
    pub fn recalled_for_bind(&self, time: Duration) {
        self.moves.waited(time);
    }

    /// Counts the outcome of orders to make MIG instances.
    pub fn mig_ordered<'a>(
        &self,
        profiles: impl Iterator<Item = &'a MigProfile>,
        result: MakeResult,
    ) {
        self.mig.ordered(profiles, result);
    }

    /// Notes how long a bind waited for the MIG instances of its pod.
    pub fn waited_for_mig(&self, profile: &MigProfile, time: Duration) {
        self.mig.waited(profile, time);
    }

    /// Sets which MIG instances there are, and how many more could be made.
    pub fn set_mig(&self, all: &BTreeMap<MigProfile, MigFigures>) {
        self.mig.show(all);
    }

    /// Sets how many orders about MIG instances fail now.
    pub fn set_failed_mig_orders(&self, failed: FailedMigOrders) {
        self.mig.show_failed(failed);
    }

    /// Sets what is borrowed now.
    pub fn set_lent(&self, lent: LentFigures) {
        self.moves.lent(lent);
    }

    /// Counts the outcome of an eviction.
    pub fn evicted(&self, reason: EvictionReason, result: EvictionResult) {
        self.guard.evicted(reason, result);
    }

    /// Sets when certificates end, in seconds since 1970; 0: not known, or none.
    pub fn set_certificates(&self, ends: [(CertificateLabel, u64); 4]) {
        for (label, end) in ends {
            self.replica.certificate_expiry.with_label_values(&[label.label()]).set(whole(end));
        }
    }

    /// Sets whether this replica leads.
    pub fn set_leader(&self, is_leader: bool) {
        self.replica.leader.set(i64::from(is_leader));
    }

    /// Sets the gauges of the service. The oldest report is in seconds since 1970; 0 if none.
    pub fn set_service(
        &self,
        is_ready: bool,
        holds: usize,
        standing_holds: usize,
        oldest_report: u64,
    ) {
        self.replica.ready.set(i64::from(is_ready));
        self.calls.holds.set(i64::try_from(holds).unwrap_or(i64::MAX));
        self.calls.standing_holds.set(i64::try_from(standing_holds).unwrap_or(i64::MAX));
        self.news.oldest_report.set(whole(oldest_report));
    }

    /// Sets for how long the API server has answered nothing but 401.
    pub fn set_token_refused(&self, lasted: Duration) {
        self.replica.token_refused.set(lasted.as_secs_f64());
    }

    /// Sets the gauges of the fleet and of waiting pods.
    pub fn set_fleet(&self, fleet: &FleetFigures, queue: &QueueFigures) {
        self.fleet.show(fleet);
        self.demand.show(queue);
    }

    /// Sets what each team may have and has.
    pub fn set_teams(&self, teams: &[TeamFigures]) {
        self.demand.show_teams(teams);
    }

    /// All families in the text format.
    pub fn text(&self) -> Vec<u8> {
        let mut text = self.text_of_process();
        valid(TextEncoder::new().encode(&self.of_cluster.gather(), &mut text));
        text
    }

    /// The families about this process alone, for a replica that does not lead.
    pub fn text_of_process(&self) -> Vec<u8> {
        let mut text = Vec::new();
        valid(TextEncoder::new().encode(&self.registry.gather(), &mut text));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_series_exists_before_its_first_event() {
        let metrics = Metrics::new();
        metrics.set_fleet(&FleetFigures::default(), &QueueFigures::default());
        let text = String::from_utf8(metrics.text()).unwrap();
        for part in [
            "gpupack_verb_duration_seconds_count{outcome=\"refused\",verb=\"bind\"} 0",
            "gpupack_refusals_total{reason=\"not_reporting\"} 0",
            "gpupack_binds_total{outcome=\"conflict\"} 0",
            "gpupack_nodes{state=\"never\"} 0",
            "gpupack_waiting_pods{reason=\"memory\",size=\"0.5\"} 0",
            "gpupack_ready 0",
            "gpupack_certificate_expiry_timestamp_seconds{certificate=\"webhook\"} 0",
            "gpupack_build_info{component=\"extender\"",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
