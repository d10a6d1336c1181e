//! What NVIDIA's tools do with the driver of a node, as labels of its Node object say.
//!
//! The GPU Operator upgrades the driver (`pkg/upgrade/consts.go` and `ApplyState` of
//! NVIDIA/k8s-operator-libs). MIG Manager divides GPUs again (`pkg/mig/reconfigure` of
//! NVIDIA/mig-parted). Neither evicts a DaemonSet, and neither gets on while a process has the
//! driver open.

/// How far the upgrade of a node's driver is, in the order in which a node passes these states.
/// `upgrade-done` and no label at all mean nothing, and have no value here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum UpgradeState {
    /// `upgrade-required`: the node waits for its turn. With `maxParallelUpgrades: 1` every node
    /// has it at once.
    Required,
    /// `node-maintenance-required`: instead of the states up to `drain-required`, another operator
    /// cordons and drains the node. Every node has it at once (`ProcessUpgradeRequiredNodes` of
    /// `upgrade_requestor.go` has no limit), so it means as much as [`UpgradeState::Required`]. The GPU
    /// Operator up to 26.7 does not use it.
    NodeMaintenance,
    /// `cordon-required`
    Cordon,
    /// `wait-for-jobs-required`: the node is cordoned, and pods that were chosen may end first.
    WaitForJobs,
    /// `pod-deletion-required`: pods that request `nvidia.com/gpu…` are evicted.
    PodDeletion,
    /// `drain-required`: all other pods but those of DaemonSets are, if the policy has a drain.
    Drain,
    /// `post-maintenance-required`: what follows `node-maintenance-required`; nothing sets it yet.
    PostMaintenance,
    /// `pod-restart-required`: the driver's pod ends, unloads the driver, and loads the new one.
    PodRestart,
    /// `validation-required`: the new driver is loaded and its pod ready.
    Validation,
    /// `uncordon-required`
    Uncordon,
    /// `upgrade-failed`: a drain failed, or the driver's pod keeps failing.
    Failed,
}

impl UpgradeState {
    /// All of them, in their order.
    pub const ALL: [Self; 11] = [
        Self::Required,
        Self::NodeMaintenance,
        Self::Cordon,
        Self::WaitForJobs,
        Self::PodDeletion,
        Self::Drain,
        Self::PostMaintenance,
        Self::PodRestart,
        Self::Validation,
        Self::Uncordon,
        Self::Failed,
    ];

    /// The value of the label.
    pub const fn value(self) -> &'static str {
        match self {
            Self::Required => "upgrade-required",
            Self::NodeMaintenance => "node-maintenance-required",
            Self::Cordon => "cordon-required",
            Self::WaitForJobs => "wait-for-jobs-required",
            Self::PodDeletion => "pod-deletion-required",
            Self::Drain => "drain-required",
            Self::PostMaintenance => "post-maintenance-required",
            Self::PodRestart => "pod-restart-required",
            Self::Validation => "validation-required",
            Self::Uncordon => "uncordon-required",
            Self::Failed => "upgrade-failed",
        }
    }

    /// Whether no new pod is to come: it would be evicted, or start without a driver.
    pub fn refuses_pods(self) -> bool {
        !self.is_waiting()
    }

    /// Whether the upgrade has not begun, so that the node is only the last to choose.
    pub fn is_waiting(self) -> bool {
        matches!(self, Self::Required | Self::NodeMaintenance)
    }

    /// Whether a process that has the driver open would be in the way: from the first eviction until
    /// the new driver is loaded.
    pub fn unloads_driver(self) -> bool {
        matches!(self, Self::PodDeletion | Self::Drain | Self::PostMaintenance | Self::PodRestart)
    }
}

/// That MIG Manager is changing the GPUs. `success` and `failed` mean that it is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MigChange {
    /// `pending`: it stops what uses the GPUs, and changes them.
    Pending,
    /// `rebooting`: the change takes effect with the next boot.
    Rebooting,
}

impl MigChange {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Pending, Self::Rebooting];

    /// The value of the label.
    pub const fn value(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Rebooting => "rebooting",
        }
    }
}

/// What NVIDIA's tools do with the driver of a node now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DriverWork {
    /// The upgrade of the driver.
    pub upgrade: Option<UpgradeState>,
    /// The change of MIG devices.
    pub mig: Option<MigChange>,
}

impl DriverWork {
    /// The label of the GPU Operator.
    pub const UPGRADE_LABEL: &str = "nvidia.com/gpu-driver-upgrade-state";

    /// The label of MIG Manager.
    pub const MIG_LABEL: &str = "nvidia.com/mig.config.state";

    /// Whether an upgrade is to begin, and nothing else is in the way.
    pub fn is_waiting(self) -> bool {
        self.upgrade.is_some_and(UpgradeState::is_waiting)
    }

    /// Why no process may have the driver open, as label and value; `None` if it may be open.
    pub fn closes_library(self) -> Option<String> {
        let upgrade = self.upgrade.filter(|state| state.unloads_driver());
        let upgrade = upgrade.map(|state| format!("{}={}", Self::UPGRADE_LABEL, state.value()));
        upgrade.or_else(|| self.mig.map(|mig| format!("{}={}", Self::MIG_LABEL, mig.value())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_state_means_what_the_operator_does_in_it() {
        let meaning = |state: UpgradeState| {
            let closes = DriverWork { upgrade: Some(state), mig: None }.closes_library().is_some();
            let refuses = if state.refuses_pods() { "refuses" } else { "last" };
            format!("{} {refuses}{}", state.value(), if closes { " closed" } else { "" })
        };
        let all: Vec<String> = UpgradeState::ALL.into_iter().map(meaning).collect();
        assert_eq!(
            all,
            [
                "upgrade-required last",
                "node-maintenance-required last",
                "cordon-required refuses",
                "wait-for-jobs-required refuses",
                "pod-deletion-required refuses closed",
                "drain-required refuses closed",
                "post-maintenance-required refuses closed",
                "pod-restart-required refuses closed",
                "validation-required refuses",
                "uncordon-required refuses",
                "upgrade-failed refuses",
            ]
        );
        assert!(UpgradeState::ALL.is_sorted());
        let mig = DriverWork { upgrade: None, mig: Some(MigChange::Rebooting) };
        assert_eq!(mig.closes_library().as_deref(), Some("nvidia.com/mig.config.state=rebooting"));
        assert_eq!(DriverWork::default().closes_library(), None);
    }
}
