//! What each account (namespace and priority class) is allocated and uses over time, for chargeback.
//!
//! The ledger is sampled every few seconds, and each sample counts for the time since the last one.
//! A pod that comes and goes in between does not count. The other errors even out on average.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::metrics::demand::AccountUse;
use crate::shared::app::App;
use crate::shared::priority_classes::Account;
use engine::model::device_state::DeviceState;
use engine::model::node_state::NodeState;
use engine::usage::node_details::NodeDetails;
use wire::ids::PodUid;
use wire::units::Share;

/// Longest time that one sample counts for: what was held while the process stood still is unknown.
const LONGEST: Duration = Duration::from_secs(60);

/// Counts what is held and used for the time since the last look.
pub fn account(app: &App) {
    let now = app.clock.now();
    let last = app.pods.classes.last.lock().replace(now);
    let Some(last) = last else { return };
    let millis = now.since(last).min(LONGEST).as_millis();
    let mut sample =
        LedgerSample { app, millis, accounts: BTreeMap::new(), holders: BTreeSet::new() };
    app.ledger.look_into_each(|node, details| {
        for device_state in node.devices() {
            if !device_state.tenants().is_empty() || !device_state.guests().is_empty() {
                sample.count(node, device_state, details);
            }
        }
    });
    let LedgerSample { accounts, holders, .. } = sample;
    app.pods.classes.of_pods.retain(|uid, _| holders.contains(uid) || app.waiting.has(uid));
    if !app.lead.leading.is_here() {
        return; // the replica that leads counts
    }
    for ((namespace, class), used) in accounts {
        app.metrics.used(&namespace, &class, used);
    }
}

/// What is held and used, for the time since the last look.
struct LedgerSample<'a> {
    app: &'a App,
    millis: u128,
    accounts: BTreeMap<Account, AccountUse>,
    /// The pods with a priority class that hold something.
    holders: BTreeSet<PodUid>,
}

impl LedgerSample<'_> {
    /// Counts the tenants of one device. Busy time is known per device only, so each tenant counts for
    /// its part of the allocated share.
    fn count(&mut self, node: &NodeState, device_state: &DeviceState, details: &NodeDetails) {
        let Self { app, millis, accounts, holders } = self;
        let seen = details.usage_samples.on(&device_state.device().id);
        let running = device_state.running().map(|(_, held)| u128::from(held.share.millionths()));
        let all = running.sum::<u128>().max(1);
        let busy = device_state
            .busy_percent()
            .map(|percent| u128::from(percent) * u128::from(Share::WHOLE.millionths()) / 100);
        for (uid, held) in device_state.tenants() {
            let namespace = node.reservation(uid).map_or("", |held| held.pod.namespace());
            let account =
                accounts.entry((namespace.to_owned(), app.pods.classes.class_of(uid))).or_default();
            account.share_allocated += u128::from(held.share.millionths()) * *millis;
            account.memory_allocated += u128::from(held.memory.mib()) * *millis;
            if app.pods.classes.of_pods.contains_key(uid) {
                holders.insert(uid.clone());
            }
        }
        for (uid, held) in device_state.running() {
            let namespace = node.reservation(uid).map_or("", |held| held.pod.namespace());
            let account =
                accounts.entry((namespace.to_owned(), app.pods.classes.class_of(uid))).or_default();
            let share = u128::from(held.share.millionths());
            account.share_used += busy.map_or(0, |busy| busy * share / all) * *millis;
            let used = seen.and_then(|seen| seen.pods.get(uid)).map_or(0, |seen| seen.used.mib());
            account.memory_used += u128::from(used) * *millis;
        }
    }
}
