//! How the devices of each pool are shared: the operator's rules, and the nodes that they change.

use crate::hardware::device::PoolName;
use crate::hardware::pool::PoolRules;
use crate::ledger::nodes::state::Ledger;

impl Ledger {
    /// Shares the devices of each pool by these rules from now on.
    pub fn share_by(&self, pools: PoolRules) {
        let _stays = self.stay();
        self.world_mut().pools = pools;
        for at in self.slots().present() {
            let pool = self.slot(at).read().pool().clone();
            self.share_pool(at, &pool);
        }
    }

    /// Shares the devices of a node by the rule of `pool`. Returns whether the rule changed.
    pub(crate) fn share_pool(&self, at: usize, pool: &PoolName) -> bool {
        let slot = self.slot(at);
        if self.world().pools.of(pool) == slot.read().rule() {
            return false; // as nearly always; so no call waits
        }
        let mut world = self.world_mut();
        let rule = world.pools.of(pool);
        world.change_classes(|classes| slot.change(|books| books.share_by(rule, classes)));
        true
    }
}
