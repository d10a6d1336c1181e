//! An extender over the cluster.

use std::sync::Arc;

use control::shared::app::App;
use kube_api::config::file::Config;
use runtime::clock::Clock;
use wire::units::Timestamp;

use super::common::{Cluster, cluster};

/// An extender that is ready, and the names of its nodes. `keep_best` is as in its configuration.
pub(crate) fn extender(nodes: usize, keep_best: usize) -> (App, Vec<String>) {
    let Cluster { ledger, names } = cluster(nodes);
    ledger.set_listed(Timestamp::START);
    let keep_best = std::num::NonZeroUsize::new(keep_best);
    let config = Config { keep_best, ..Config::default() };
    let app = App::alone(Arc::new(ledger), config, Clock::start());
    app.lead.set_fenced();
    (app, names)
}
