//! What a probe found on its node: from values to a line.

use std::collections::{BTreeMap, BTreeSet};

use crate::doctor::finding::{CheckRow, Findings, short};
use wire::api::commands::CheckState::{NotChecked, Ok as Good, Problem};
use wire::api::commands::{Check, CheckState, SeenDevice, SeenDevices};
use wire::api::state::DeviceKind;

/// How a probe ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Outcome {
    /// It ended, and said what it saw.
    Seen {
        /// UUIDs that the ledger holds for it.
        placed: BTreeSet<String>,
        /// The driver's limit that it was to have on each, in MiB.
        limit_mib: Option<u64>,
        /// What its container has.
        seen: SeenDevices,
    },
    /// The API server did not take it.
    NotAdmitted(String),
    /// It was not placed, with the reason of the scheduler.
    NotPlaced(String),
    /// Its container could not be started: the words of the runtime.
    NotStarted(String),
    /// Nothing can be said, for this reason.
    Unknown(String),
}

const fn row(state: CheckState, found: &'static str, fix: &'static str) -> CheckRow {
    CheckRow { check: "probe", state, found, fix }
}

const WORKED: CheckRow = row(
    Good,
    "on {#node} a container got the device that the ledger held for it, and no other: {..}",
    "",
);
const LIMITED: CheckRow =
    row(Good, "on {#node} it also had the driver's limit of its share: {..}", "");
const UNPLACED: CheckRow = row(
    NotChecked,
    "the probe was not placed on {#node} ({..}): {0}",
    "run it again when the node takes pods and has room for the smallest share; a probe evicts no pod",
);
pub(crate) const INTERRUPTED: CheckRow =
    row(NotChecked, "the probes were interrupted", "run gpupack doctor --probe again");
const NOT_ADMITTED: CheckRow = row(
    NotChecked,
    "the API server takes no probe for {#node} ({..}): {0}",
    "set rbac.probe: true of the chart, or apply deploy/probe.yaml of this release",
);
const UNKNOWN: CheckRow =
    row(NotChecked, "on {#node} ({..}): {0}", "see the pods of gpupack there, and run it again");
pub(crate) const NOT_ALLOWED: CheckRow = row(
    NotChecked,
    "it needs pods in namespace {0}: {1}",
    "set rbac.probe: true of the chart and bind the Role gpupack-probe to this user",
);
pub(crate) const NO_AGENTS: CheckRow = row(
    NotChecked,
    "it takes image and runtime from the DaemonSet of the agents, which was not read",
    "see the check `agents`",
);
pub(crate) const SILENT: CheckRow = row(
    NotChecked,
    "{#node} whose agent does not report, so that no pod is placed there: {..}",
    "see the check `agents`; where the agent finds no library although the driver is there, check \
     accept-nvidia-visible-devices-envvar-when-unprivileged of the container toolkit",
);
const REFUSED: CheckRow = row(
    Problem,
    "{0}: the runtime did not start the container: {1}",
    "docs/operations.md#pods-without-their-gpu says what to do",
);
const IGNORED: CheckRow = row(
    Problem,
    "{0}: the container got no GPU, and NVIDIA_VISIBLE_DEVICES is still there: the runtime did not act on it",
    "set accept-nvidia-visible-devices-envvar-when-unprivileged = true in the configuration of NVIDIA's \
     container toolkit there (on Bottlerocket the default is false: docs/platforms.md#versions), and see that the \
     handler of the RuntimeClass is NVIDIA's runtime",
);
const EARLY: CheckRow = row(
    Problem,
    "{0}: the container got no GPU, because the driver's module is not loaded",
    "install the driver, or wait until it is loaded; then make containers that started before it again",
);
const BLIND: CheckRow = row(
    Problem,
    "{0}: the container sees no GPU: {1}",
    "compare the driver of the node with docs/platforms.md#versions",
);
const MISSING: CheckRow = row(
    Problem,
    "{0}: the ledger held {1} for the container, and it does not see that",
    "delete the agent's pod there, so that it reads the devices again; then run it again",
);
const MORE: CheckRow = row(
    Problem,
    "{0}: the container also sees {1}, which is not its own",
    "see what else gives devices there: the default runtime, a device plugin, CDI annotations \
     (docs/admission.md#what-this-does-not-prevent)",
);
const UNLIMITED: CheckRow = row(
    Problem,
    "{0}: the driver's limit is not in force: NVML shows {1} MiB in the container, and its share has {2}",
    "memory_limit: driver takes driver 615, container toolkit 1.20.1 and cgroup version 2 on the node; else set \
     webhook.memory_limit: mps or none",
);

/// The lines about all probes: one for those that are as they should be, and one for each reason why others say
/// nothing.
pub(crate) fn verdicts(probes: &[(String, Outcome)]) -> Findings {
    let (mut found, mut good, mut limited) = (Findings::new(), Vec::new(), Vec::new());
    let mut silent: BTreeMap<(usize, String), Vec<&str>> = BTreeMap::new();
    for (node, outcome) in probes {
        let (row, why) = match outcome {
            Outcome::NotAdmitted(why) => (0, why),
            Outcome::NotPlaced(why) => (1, why),
            Outcome::Unknown(why) => (2, why),
            Outcome::NotStarted(why) => {
                found.push(REFUSED.with([&node, &short(why)]));
                continue;
            }
            Outcome::Seen { placed, limit_mib, seen } => {
                match problem(node, placed, seen).or_else(|| unlimited(node, *limit_mib, seen)) {
                    Some(line) => found.push(line),
                    None => {
                        good.push(node);
                        limited.extend(limit_mib.map(|_| node));
                    }
                }
                continue;
            }
        };
        silent.entry((row, short(why))).or_default().push(node);
    }
    for ((row, why), nodes) in silent {
        found.extend([NOT_ADMITTED, UNPLACED, UNKNOWN][row].about_with(&nodes, [&why]));
    }
    found.extend(WORKED.about(&good));
    found.extend(LIMITED.about(&limited));
    found
}

/// The devices that a container can use.
fn usable(seen: &SeenDevices) -> impl Iterator<Item = &SeenDevice> {
    seen.items.iter().filter(|device| device.device_kind != DeviceKind::MigParent)
}

/// What is wrong with the devices of a container.
fn problem(node: &str, placed: &BTreeSet<String>, seen: &SeenDevices) -> Option<Check> {
    let there: BTreeSet<&str> = usable(seen).map(|device| device.uuid.as_str()).collect();
    if let Some(more) = there.iter().find(|uuid| !placed.contains(**uuid)) {
        return Some(MORE.with([&node, &short(more)]));
    }
    if seen.left_out > 0 {
        return Some(MORE.with([&node, &format!("{} more devices", seen.left_out)]));
    }
    if there.is_empty() {
        return Some(blind(node, seen));
    }
    let missing = placed.iter().find(|uuid| !there.contains(uuid.as_str()))?;
    Some(MISSING.with([&node, missing]))
}

/// Whether a device shows more than its limit there.
fn unlimited(node: &str, limit_mib: Option<u64>, seen: &SeenDevices) -> Option<Check> {
    let limit = limit_mib?;
    let odd = usable(seen).find(|device| device.memory_mib != limit)?;
    Some(UNLIMITED.with([&node, &odd.memory_mib, &limit]))
}

/// Why a container sees nothing.
fn blind(node: &str, seen: &SeenDevices) -> Check {
    match (seen.module_loaded, seen.visible_devices.contains("nvidia.com/gpu=")) {
        (Some(false), _) => EARLY.with([&node]),
        (_, true) => IGNORED.with([&node]),
        (_, false) => {
            let why = seen.error.as_deref().unwrap_or("NVML lists none");
            BLIND.with([&node, &short(why)])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(uuid: &str, device_kind: DeviceKind) -> SeenDevice {
        SeenDevice { uuid: uuid.to_owned(), device_kind, memory_mib: 81_920 }
    }

    fn outcome(items: &[SeenDevice]) -> Outcome {
        let seen = SeenDevices {
            items: items.to_vec(),
            module_loaded: Some(true),
            visible_devices: "void".to_owned(),
            ..SeenDevices::default()
        };
        Outcome::Seen { placed: BTreeSet::from(["GPU-a".to_owned()]), limit_mib: None, seen }
    }

    fn said(outcome: Outcome) -> (CheckState, String) {
        let mut found = verdicts(&[("n1".to_owned(), outcome)]);
        let last = found.pop().unwrap();
        (last.state, format!("{} {}", last.found, last.fix.unwrap_or_default()))
    }

    #[test]
    fn exactly_the_promised_device_is_right() {
        let (gpu, other) = (device("GPU-a", DeviceKind::Gpu), device("GPU-b", DeviceKind::Gpu));
        assert_eq!(said(outcome(std::slice::from_ref(&gpu))).0, Good);
        for (items, part) in [
            (vec![gpu.clone(), other.clone()], "also sees GPU-b"),
            (vec![other], "also sees GPU-b"),
            (vec![], "sees no GPU: NVML lists none"),
            (vec![device("GPU-p", DeviceKind::MigParent)], "sees no GPU"),
        ] {
            let (state, text) = said(outcome(&items));
            assert!(state == Problem && text.contains(part), "{text}");
        }
        let parent = device("GPU-p", DeviceKind::MigParent);
        let instance = SeenDevice { device_kind: DeviceKind::MigInstance, ..gpu };
        assert_eq!(said(outcome(&[parent, instance])).0, Good);
    }

    #[test]
    fn a_container_without_a_gpu_is_explained_by_the_setting_or_the_driver() {
        let blind = |module_loaded, variable: &str| {
            let Outcome::Seen { placed, limit_mib, seen } = outcome(&[]) else { unreachable!() };
            let visible_devices = variable.to_owned();
            let seen = SeenDevices { module_loaded, visible_devices, ..seen };
            said(Outcome::Seen { placed, limit_mib, seen }).1
        };
        let setting = "accept-nvidia-visible-devices-envvar-when-unprivileged";
        for loaded in [Some(true), None] {
            assert!(blind(loaded, "runtime.nvidia.com/gpu=GPU-a").contains(setting));
            assert!(!blind(loaded, "void").contains(setting));
        }
        let early = blind(Some(false), "runtime.nvidia.com/gpu=GPU-a");
        assert!(early.contains("not loaded") && !early.contains(setting), "{early}");
    }

    #[test]
    fn a_limit_is_what_nvml_shows_and_a_full_node_is_not_checked() {
        let limited = |memory_mib| {
            let gpu = SeenDevice { memory_mib, ..device("GPU-a", DeviceKind::Gpu) };
            let Outcome::Seen { placed, seen, .. } = outcome(&[gpu]) else { unreachable!() };
            said(Outcome::Seen { placed, limit_mib: Some(1), seen })
        };
        assert!(limited(81_920).1.contains("not in force"), "{:?}", limited(81_920));
        assert_eq!(limited(1).0, Good);
        for outcome in [Outcome::NotPlaced("full".into()), Outcome::Unknown("no log".into())] {
            assert_eq!(said(outcome).0, NotChecked);
        }
        let two = ["n1", "n2"].map(|node| (node.to_owned(), Outcome::NotPlaced("full".to_owned())));
        assert_eq!(verdicts(&two).len(), 1, "one line for one reason");
        let no_class =
            Outcome::NotAdmitted("no PriorityClass with name gpupack-probe was found".into());
        assert!(said(no_class).1.contains("rbac.probe"));
        assert_eq!(said(Outcome::NotStarted("unresolvable CDI devices".into())).0, Problem);
    }
}
