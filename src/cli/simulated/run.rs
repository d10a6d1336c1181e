//! Agents of all nodes of a fleet in one process.

use crate::simulated::fleet::{Fleet, FleetNode};
use crate::simulated::probe::SimulatedProbe;
use agent::gpu::sample::Probe;
use agent::node::config::AgentConfig;
use agent::node::run::{AgentError, ProbedNode, run_nodes};

/// Plays all nodes of `fleet` in one process, with their reports spread over the period, until
/// `stop` is done.
///
/// # Errors
/// [`AgentError`] for an address that cannot be used.
pub async fn run_fleet(
    config: &AgentConfig,
    fleet: &Fleet,
    stop: impl Future<Output = ()>,
) -> Result<(), AgentError> {
    run_probes(config, fleet, |node| SimulatedProbe::new(fleet, node), stop).await
}

/// The same with other probes of the nodes.
///
/// # Errors
/// As [`run_fleet`].
pub async fn run_probes<P: Probe + 'static>(
    config: &AgentConfig,
    fleet: &Fleet,
    probe: impl Fn(&FleetNode) -> P,
    stop: impl Future<Output = ()>,
) -> Result<(), AgentError> {
    let nodes = fleet.nodes.iter();
    let nodes = nodes.map(|node| ProbedNode { name: node.name.clone(), probe: probe(node) });
    run_nodes(config, nodes.collect(), stop).await
}
