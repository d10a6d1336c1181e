//! How the devices of each pool are shared: the operator's rules, and the nodes that they change.

use crate::hardware::pool::PoolRules;
use crate::ledger::nodes::state::Ledger;
use crate::scoring::guests;
use wire::ids::PoolName;

impl Ledger {
    /// Shares the devices of each pool by these rules from now on.
    pub fn share_by(&self, pools: PoolRules) {
        let _stays = self.stay();
        self.cluster_mut().pools = pools;
        for at in self.node_table().present() {
            let pool = self.node_entry(at).read().pool().clone();
            self.share_pool(at, &pool);
        }
    }

    /// Shares the devices of a node by the rule of `pool`. Returns whether the rule changed.
    pub(crate) fn share_pool(&self, at: usize, pool: &PoolName) -> bool {
        let node_entry = self.node_entry(at);
        if self.cluster().pools.of(pool) == node_entry.read().rule() {
            return false; // as nearly always; so no call waits
        }
        let mut cluster = self.cluster_mut();
        let rule = cluster.pools.of(pool);
        cluster.change_classes(|classes| {
            node_entry.change(|node_state| {
                node_state.share_by(rule, classes);
                guests::recall_excess(node_state);
            })
        });
        true
    }
}
