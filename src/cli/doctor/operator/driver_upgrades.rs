//! What NVIDIA's GPU Operator is to do about drivers, and what becomes of gpupack's pods then.
//!
//! Before it replaces a driver, the operator evicts only pods that request `nvidia.com/gpu…` or `nvidia.com/mig-…`
//! (`gpuPodSpecFilter` of its `main.go`). Pods that request by annotation stay, and the old driver cannot be
//! unloaded. A drain in the policy does not change that: it follows only where such an eviction has failed
//! (`SchedulePodEviction` of `pkg/upgrade/pod_manager.go`, NVIDIA/k8s-operator-libs). And while the policy is on,
//! the driver's own pod drains nothing (`isAutoDrainEnabled` of NVIDIA/k8s-driver-manager).

use serde_json::Value;

use crate::base::reader::{Read, Reader, Unread};
use crate::doctor::finding::{CheckRow, Findings, Found, short};
use crate::doctor::rights;
use crate::doctor::table::*;
use wire::api::commands::Check;

/// The objects of the operator. Where it is not installed, they are absent.
pub(crate) struct OperatorFacts {
    pub(crate) policies: Read<Vec<UpgradePolicy>>,
    pub(crate) drivers: Read<Vec<UpgradePolicy>>,
    /// Names of GPUClusters.
    pub(crate) clusters: Read<Vec<String>>,
}

/// How an object of the operator has drivers upgraded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UpgradePolicy {
    /// Its kind and name.
    object: String,
    /// Whether it decides about drivers at all.
    has_drivers: bool,
    /// Whether it replaces drivers without being asked.
    is_automatic: bool,
    /// Whether it drains a node where evictions have failed.
    drains: bool,
    /// Whether it first waits for the end of pods with some labels, however long that takes.
    awaits: bool,
}

impl OperatorFacts {
    /// Reads them.
    pub(crate) async fn read(reader: &Reader) -> Self {
        let (policies, drivers, clusters) = tokio::join!(
            reader.list(&rights::CLUSTER_POLICIES, "", UpgradePolicy::of_cluster_policy),
            reader.list(&rights::NVIDIA_DRIVERS, "", UpgradePolicy::of_driver),
            reader.list(&rights::GPU_CLUSTERS, "", |object: Value| name(&object)),
        );
        Self { policies, drivers, clusters }
    }
}

fn name(object: &Value) -> String {
    short(object["metadata"]["name"].as_str().unwrap_or_default())
}

impl UpgradePolicy {
    /// Of a ClusterPolicy, where upgrades are off by default.
    pub(crate) fn of_cluster_policy(object: Value) -> Self {
        let driver = &object["spec"]["driver"];
        let policy = &driver["upgradePolicy"];
        Self {
            object: format!("ClusterPolicy {}", name(&object)),
            has_drivers: driver["enabled"] != false && driver["useNvidiaDriverCRD"] != true,
            is_automatic: policy["autoUpgrade"] == true,
            ..Self::of(policy)
        }
    }

    /// Of an NVIDIADriver, where they are on by default.
    pub(crate) fn of_driver(object: Value) -> Self {
        let policy = &object["spec"]["upgradePolicy"];
        Self {
            object: format!("NVIDIADriver {}", name(&object)),
            has_drivers: true,
            is_automatic: policy["autoUpgrade"] != false,
            ..Self::of(policy)
        }
    }

    fn of(policy: &Value) -> Self {
        let wait = &policy["waitForCompletion"];
        let is_endless = wait["timeoutSeconds"].as_i64().unwrap_or_default() == 0;
        let awaited = wait["podSelector"].as_str().unwrap_or_default();
        Self {
            object: String::new(),
            has_drivers: false,
            is_automatic: false,
            drains: policy["drain"]["enable"] == true,
            awaits: is_endless && !awaited.is_empty(),
        }
    }

    /// What there is to say about it.
    fn row(&self) -> Option<CheckRow> {
        let row = match (self.is_automatic, self.awaits, self.drains) {
            (false, _, _) => NO_UPGRADES,
            (true, true, _) => UPGRADES_WAIT,
            (true, false, false) => NO_DRAIN,
            (true, false, true) => LATE_DRAIN,
        };
        self.has_drivers.then_some(row)
    }
}

/// What was read, unless there is none; a line where it could not be read.
fn present<'a, T>(read: &'a Read<Vec<T>>, unread: &CheckRow) -> Result<&'a [T], Check> {
    match read {
        Ok(all) => Ok(all),
        Err(Unread::Absent) => Ok(&[]),
        Err(why) => Err(unread.unread([], why)),
    }
}

/// Whether upgrades of drivers go well with pods of gpupack; nothing where there is no operator.
pub(crate) fn upgrades(facts: &OperatorFacts) -> Found {
    let policies = present(&facts.policies, &CLUSTER_POLICY)?;
    let drivers = present(&facts.drivers, &NVIDIA_DRIVER)?;
    let clusters = present(&facts.clusters, &GPU_CLUSTER)?;
    let all: Vec<&UpgradePolicy> = policies.iter().chain(drivers).collect();
    let mut found = Findings::new();
    for row in [NO_UPGRADES, UPGRADES_WAIT, NO_DRAIN, LATE_DRAIN] {
        let of_row =
            all.iter().filter(|policy| policy.row().is_some_and(|it| it.found == row.found));
        let objects: Vec<&str> = of_row.map(|policy| policy.object.as_str()).collect();
        found.extend(row.about(&objects));
    }
    found.extend(IS_GPU_CLUSTER.about(clusters));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::lines;
    use serde_json::json;
    use wire::api::commands::CheckState::{self, NotChecked, Ok as Good, Warning};

    fn facts(policies: &[Value], drivers: &[Value], clusters: &[&str]) -> OperatorFacts {
        let named = |spec: &Value| json!({"metadata": {"name": "a"}, "spec": spec});
        let policies = policies.iter().map(|it| UpgradePolicy::of_cluster_policy(named(it)));
        let drivers = drivers.iter().map(|it| UpgradePolicy::of_driver(named(it)));
        OperatorFacts {
            policies: Ok(policies.collect()),
            drivers: Ok(drivers.collect()),
            clusters: Ok(clusters.iter().map(ToString::to_string).collect()),
        }
    }

    fn states(facts: &OperatorFacts) -> Vec<CheckState> {
        lines(upgrades(facts)).iter().map(|check| check.state).collect()
    }

    #[test]
    fn an_upgrade_hangs_on_pods_that_are_not_evicted() {
        let of_policy =
            |policy: Value| facts(&[json!({"driver": {"upgradePolicy": policy}})], &[], &[]);
        let said = |policy: Value| {
            let found = lines(upgrades(&of_policy(policy)));
            assert_eq!(found.len(), 1, "{found:?}");
            (found[0].state, found[0].found.clone())
        };
        let (state, text) = said(json!({"autoUpgrade": true, "drain": {"enable": false}}));
        assert!(state == Warning && text.starts_with("ClusterPolicy a: "), "{text}");
        assert!(
            text.contains("without a drain") && text.contains("hangs on pods of gpupack"),
            "{text}"
        );
        assert_eq!(said(json!({"autoUpgrade": true})), (state, text));
        let (state, text) = said(json!({"autoUpgrade": true, "drain": {"enable": true}}));
        assert!(state == Warning && text.contains("has failed"), "{text}");
        let waits = |seconds: u32| {
            json!({"autoUpgrade": true, "drain": {"enable": true},
                "waitForCompletion": {"podSelector": "a=b", "timeoutSeconds": seconds}})
        };
        let (state, text) = said(waits(0));
        assert!(state == Good && text.contains("have ended"), "{text}");
        assert_eq!(said(waits(60)).0, Warning, "it goes on all the same");
        assert_eq!(said(json!({"autoUpgrade": false})).0, Good);
        assert_eq!(said(Value::Null).0, Good, "off by default");
    }

    #[test]
    fn each_object_has_defaults_of_its_own() {
        assert_eq!(states(&facts(&[], &[json!({})], &[])), [Warning], "on by default");
        let off = json!({"upgradePolicy": {"autoUpgrade": false}});
        assert_eq!(states(&facts(&[], &[off], &[])), [Good]);
        let automatic = json!({"autoUpgrade": true});
        for driver in [
            json!({"enabled": false, "upgradePolicy": automatic}),
            json!({"useNvidiaDriverCRD": true, "upgradePolicy": automatic}),
        ] {
            assert!(states(&facts(&[json!({"driver": driver})], &[], &[])).is_empty(), "{driver}");
        }
        assert_eq!(states(&facts(&[], &[], &["gpu-cluster"])), [Warning]);
        let many = vec![json!({}); 5_000];
        assert_eq!(states(&facts(&many, &many, &[])), [Good, Warning], "one line for all alike");
    }

    #[test]
    fn without_the_operator_nothing_is_said() {
        let none = || OperatorFacts {
            policies: Err(Unread::Absent),
            drivers: Err(Unread::Absent),
            clusters: Err(Unread::Absent),
        };
        assert!(states(&none()).is_empty());
        let forbidden = Err(Unread::Forbidden("list it".to_owned()));
        assert_eq!(states(&OperatorFacts { drivers: forbidden, ..none() }), [NotChecked]);
        let odd = facts(&[json!([])], &[json!("x")], &[]);
        assert_eq!(states(&odd), [Good, Warning], "of another form");
    }
}
