//! The judge: reads pods as the API server has them and GPUs as the fleet file has them, and does
//! its own arithmetic. It shares no code with gpupack and never calls it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use serde::Deserialize;

use crate::fleet::{Fleet, FleetGpu};
use crate::pods::UNTRACKED;

/// What gpupack writes on the Binding.
pub(crate) const PLACEMENT: &str = "placed.gpupack.dev/placement";
/// The same devices in the form the container runtime takes.
pub(crate) const DEVICES: &str = "placed.gpupack.dev/devices";

/// The container resource of whole GPUs.
pub(crate) const GPU: &str = "nvidia.com/gpu";

/// The container resource of slots, and how many slots a GPU has wherever a scenario requests one.
pub(crate) const SLOT: &str = "nvidia.com/gpu.shared";
/// The number of those slots.
pub(crate) const SLOTS: u64 = 4;

/// A whole GPU's compute share.
const WHOLE: u64 = 1_000_000;

/// A bound pod's part of the GPUs of its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tenancy {
    /// Namespace and name.
    pub(crate) pod: String,
    /// Node that it is bound to.
    pub(crate) node: String,
    /// One entry per device that it runs on.
    pub(crate) uses: Vec<Use>,
    /// The device that it is allocated, if it runs on another one.
    pub(crate) home: Option<Vec<String>>,
    /// Placed by somebody else.
    pub(crate) untracked: bool,
}

/// Memory and share on one device.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Use {
    /// GPU UUID.
    #[serde(rename = "id")]
    pub(crate) device: String,
    /// Memory in MiB.
    pub(crate) mib: u64,
    /// Compute share in millionths.
    pub(crate) share: u64,
}

#[derive(Debug, Deserialize)]
struct Written {
    v: u64,
    devices: Vec<Use>,
    home: Option<Vec<String>>,
}

impl Tenancy {
    /// What it is allocated, wherever it runs.
    pub(crate) fn at_home(&self) -> Self {
        let mut here = self.clone();
        for (used, home) in here.uses.iter_mut().zip(here.home.take().into_iter().flatten()) {
            used.device = home;
        }
        here
    }
}

/// Memory and share in use on each device.
pub(crate) type Load = BTreeMap<String, (u64, u64)>;

/// What the pod holds: nothing while it is not bound, and nothing once it has ended.
///
/// The error says what is wrong with this pod alone: a request without a placement, amounts that
/// are not the request's, a device of another node, two annotations that disagree.
pub(crate) fn tenancy(pod: &Pod, fleet: &Fleet) -> Result<Option<Tenancy>, String> {
    let name = full_name(pod);
    let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) else {
        return Ok(None);
    };
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return Ok(None);
    }
    let untracked = pod.metadata.labels.iter().flatten().any(|(key, _)| key == UNTRACKED);
    let Some(text) = annotation(pod, PLACEMENT) else {
        let asks = annotation(pod, "gpu-fraction").is_some()
            || annotation(pod, "gpu-memory").is_some()
            || [GPU, SLOT].iter().any(|resource| limit(pod, resource).is_some());
        return if asks && !untracked {
            Err(format!("{name} requests a GPU and is bound to {node} without a placement"))
        } else {
            Ok(None)
        };
    };
    let written = match serde_json::from_str::<Written>(text) {
        Ok(written) => written,
        Err(_) if untracked => return Ok(None),
        Err(error) => return Err(format!("{name} has the placement `{text}`: {error}")),
    };
    let Written { v: written_version, devices: uses, home } = written;
    let tenancy = Tenancy { pod: name, node, uses, home, untracked };
    // The amounts alone reserve room; with a list of other devices the placement is invalid.
    if untracked && annotation(pod, DEVICES).is_some_and(|names| names != device_names(&tenancy)) {
        return Ok(None);
    }
    if !untracked {
        let version = written_version;
        own_faults(&tenancy, version, pod, fleet).map_err(|e| format!("{}: {e}", tenancy.pod))?;
    }
    Ok(Some(tenancy))
}

/// Faults of the devices under all tenants together: more than there is, or an unknown device.
/// What others put on a device is not gpupack's fault, unless gpupack added to it.
pub(crate) fn overloads<'a>(
    tenancies: impl IntoIterator<Item = &'a Tenancy>,
    fleet: &Fleet,
) -> Vec<String> {
    let mut faults = Vec::new();
    let tenancies: Vec<&Tenancy> = tenancies.into_iter().collect();
    let own = load(tenancies.iter().copied().filter(|tenancy| !tenancy.untracked));
    for (device, (mib, share)) in load(tenancies) {
        if !own.contains_key(&device) {
            continue;
        }
        let Some((node, gpu)) = fleet.device(&device) else {
            faults.push(format!("{device} is on no node of the fleet"));
            continue;
        };
        let capacity = gpu.capacity_mib();
        if mib > capacity || share > WHOLE {
            faults.push(format!(
                "{device} on {node} is over capacity: {mib} of {capacity} MiB, {share} of {WHOLE} millionths"
            ));
        }
    }
    faults
}

/// On how many nodes a pod that waits fits now: on as many devices as it requests, each with that much
/// unused. If it selects a node, no other counts.
pub(crate) fn fits(pod: &Pod, load: &Load, fleet: &Fleet) -> usize {
    let selector = pod.spec.as_ref().and_then(|spec| spec.node_selector.as_ref());
    let selected = selector.and_then(|selector| selector.get("kubernetes.io/hostname"));
    let count = annotation(pod, "gpu-fraction-num-devices").map_or(Ok(1), str::parse);
    let Ok(count) = count else { return 0 };
    let has_room = |gpu: &&FleetGpu| {
        let Ok((mib, share)) = demand(pod, gpu.capacity_mib()) else { return false };
        let (used_mib, used_share) = load.get(&gpu.uuid).copied().unwrap_or_default();
        used_mib + mib <= gpu.capacity_mib() && used_share + share <= WHOLE
    };
    let nodes =
        fleet.nodes.iter().filter(|node| selected.is_none_or(|selected| *selected == node.name));
    nodes.filter(|node| node.gpus.iter().filter(has_room).count() >= count).count()
}

/// Memory and share in use on each device.
pub(crate) fn load<'a>(tenancies: impl IntoIterator<Item = &'a Tenancy>) -> Load {
    let mut load = Load::new();
    for used in tenancies.into_iter().flat_map(|tenancy| &tenancy.uses) {
        let (mib, share) = load.entry(used.device.clone()).or_default();
        *mib += used.mib;
        *share += used.share;
    }
    load
}

fn own_faults(tenancy: &Tenancy, version: u64, pod: &Pod, fleet: &Fleet) -> Result<(), String> {
    if version != 1 {
        return Err(format!("placement version {version} is not 1"));
    }
    let expected = device_names(tenancy);
    let devices = annotation(pod, DEVICES).unwrap_or_default();
    if devices != expected {
        return Err(format!("{DEVICES} is `{devices}`, the placement has `{expected}`"));
    }
    let count = match annotation(pod, "gpu-fraction-num-devices").or(limit(pod, GPU)) {
        None => 1,
        Some(text) => text.parse().map_err(|_| format!("bound with the device count `{text}`"))?,
    };
    let mut distinct: Vec<&str> = tenancy.uses.iter().map(|used| used.device.as_str()).collect();
    distinct.sort_unstable();
    distinct.dedup();
    if tenancy.uses.len() != count || distinct.len() != count {
        return Err(format!("{count} devices asked, {:?} given", tenancy.uses));
    }
    for used in &tenancy.uses {
        let Some((node, gpu)) = fleet.device(&used.device) else {
            return Err(format!("{} is on no node of the fleet", used.device));
        };
        if node != tenancy.node {
            return Err(format!("{} is on {node}, the pod on {}", used.device, tenancy.node));
        }
        let (mib, share) = demand(pod, gpu.capacity_mib())?;
        if (used.mib, used.share) != (mib, share) {
            return Err(format!(
                "asks {mib} MiB, {share} millionths of {}; given {used:?}",
                gpu.model
            ));
        }
    }
    Ok(())
}

/// The devices in the form that the container runtime takes.
fn device_names(tenancy: &Tenancy) -> String {
    let name = |used: &Use| format!("runtime.nvidia.com/gpu={}", used.device);
    tenancy.uses.iter().map(name).collect::<Vec<_>>().join(",")
}

/// What the request annotations amount to on a device of that capacity: memory and share.
fn demand(pod: &Pod, capacity: u64) -> Result<(u64, u64), String> {
    let fraction = annotation(pod, "gpu-fraction").map(millionths).transpose()?;
    let memory = annotation(pod, "gpu-memory")
        .map(|text| text.parse::<u64>().map_err(|_| format!("bound with gpu-memory `{text}`")))
        .transpose()?;
    match (fraction, memory) {
        (Some(share), None) => Ok((share * capacity / WHOLE, share)),
        (None, Some(mib)) => Ok((mib, mib * WHOLE / capacity)),
        (Some(share), Some(mib)) => Ok((mib, share)),
        (None, None) if limit(pod, GPU).is_some() => Ok((capacity, WHOLE)),
        (None, None) if limit(pod, SLOT).is_some() => Ok((capacity / SLOTS, WHOLE / SLOTS)),
        (None, None) => Err("has a placement but no request".to_owned()),
    }
}

/// How much of a resource its container requests.
fn limit<'a>(pod: &'a Pod, resource: &str) -> Option<&'a str> {
    let container = pod.spec.as_ref()?.containers.first()?;
    let limits = container.resources.as_ref()?.limits.as_ref()?;
    limits.get(resource).map(|quantity| quantity.0.as_str())
}

/// `0.5` is 500,000.
fn millionths(text: &str) -> Result<u64, String> {
    let fault = || format!("bound with gpu-fraction `{text}`");
    let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
    if decimals.len() > 6 {
        return Err(fault());
    }
    let whole: u64 = whole.parse().map_err(|_| fault())?;
    let decimals: u64 = format!("{decimals:0<6}").parse().map_err(|_| fault())?;
    Ok(whole * WHOLE + decimals)
}

/// Namespace and name.
pub(crate) fn full_name(pod: &Pod) -> String {
    let part = |text: &Option<String>| text.clone().unwrap_or_default();
    format!("{}/{}", part(&pod.metadata.namespace), part(&pod.metadata.name))
}

/// The value of an annotation.
pub(crate) fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

/// A judge that finds nothing proves nothing: each fault it must find, planted.
mod tests {
    use super::*;
    use crate::fleet::A100;
    use crate::pods::PodPlan;

    const HALF: &str = r#"{"v":1,"devices":[{"id":"@0","mib":40660,"share":500000}]}"#;

    fn fleet() -> Fleet {
        Fleet::new().with("judge", 2, (2, A100))
    }

    /// The pod on node `judge-00` with `@n` in the placement replaced by its n-th device.
    fn bound(plan: PodPlan, placement: &str) -> Pod {
        let fleet = fleet();
        let mut uuids = fleet.uuids("judge-00");
        uuids.extend(fleet.uuids("judge-01"));
        let mut text = placement.to_owned();
        let mut devices = Vec::new();
        for (index, uuid) in uuids.iter().enumerate() {
            if text.contains(&format!("@{index}")) {
                text = text.replace(&format!("@{index}"), uuid);
                devices.push(format!("runtime.nvidia.com/gpu={uuid}"));
            }
        }
        let plan = plan.annotated(PLACEMENT, &text).annotated(DEVICES, &devices.join(","));
        let mut pod = plan.to_pod();
        pod.spec.get_or_insert_default().node_name = Some("judge-00".to_owned());
        pod
    }

    fn check(plan: PodPlan, placement: &str, fault: &str) {
        match tenancy(&bound(plan, placement), &fleet()) {
            Ok(found) => assert!(fault.is_empty(), "expected `{fault}`, got {found:?}"),
            Err(found) => {
                assert!(!fault.is_empty() && found.contains(fault), "`{fault}` not in `{found}`");
            }
        }
    }

    #[test]
    fn the_checker_accepts_correct_results() {
        check(PodPlan::fraction("a", "0.5"), HALF, "");
        let share =
            r#"{"v":1,"devices":[{"id":"@1","mib":1000,"share":12297}],"isolation":"none"}"#;
        check(PodPlan::memory("a", 1000), share, "");
        let both = r#"{"v":1,"devices":[{"id":"@0","mib":1000,"share":250000}]}"#;
        check(PodPlan::memory("a", 1000).annotated("gpu-fraction", "0.25"), both, "");
        let whole = r#"{"v":1,"devices":[{"id":"@0","mib":81320,"share":1000000}]}"#;
        check(PodPlan::fraction("a", "1"), whole, "");
        let slot = r#"{"v":1,"devices":[{"id":"@0","mib":20330,"share":250000}]}"#;
        check(PodPlan::new("a").limited(SLOT, "1"), slot, "");
    }

    #[test]
    fn the_checker_rejects_wrong_results() {
        let half = || PodPlan::fraction("a", "0.5");
        check(PodPlan::fraction("a", "0.4"), HALF, "asks 32528 MiB");
        check(half().annotated("gpu-fraction-num-devices", "2"), HALF, "2 devices asked");
        check(half(), &HALF.replace("@0", "@2"), "on judge-01, the pod on judge-00");
        check(half(), &HALF.replace("@0", "GPU-none"), "the placement has");
        check(half(), &HALF.replace("\"v\":1", "\"v\":2"), "version 2");
        check(half(), "{", "has the placement");
        check(PodPlan::new("a").limited(SLOT, "1"), HALF, "asks 20330 MiB");
        let mut pod = bound(half(), HALF);
        pod.metadata.annotations.get_or_insert_default().remove(PLACEMENT);
        let fault = tenancy(&pod, &fleet()).unwrap_err();
        assert!(fault.contains("without a placement"), "{fault}");
    }

    #[test]
    fn the_checker_sums_over_pods() {
        let fleet = fleet();
        let half = |name| tenancy(&bound(PodPlan::fraction(name, "0.5"), HALF), &fleet).unwrap();
        let (a, b, c) = (half("a").unwrap(), half("b").unwrap(), half("c").unwrap());
        assert_eq!(overloads([&a, &b], &fleet), Vec::<String>::new());
        assert!(overloads([&a, &b, &c], &fleet)[0].contains("over capacity: 121980 of 81320 MiB"));
    }

    #[test]
    fn the_checker_sees_where_a_pod_fits() {
        let fleet = fleet();
        let mut load = Load::new();
        let nodes = |plan: PodPlan, load: &Load| fits(&plan.to_pod(), load, &fleet);
        let pair = || PodPlan::fraction("a", "0.6").annotated("gpu-fraction-num-devices", "2");
        assert_eq!(nodes(pair(), &load), 2);
        load.insert(fleet.uuids("judge-00")[0].to_owned(), (1, 400_001));
        assert_eq!(nodes(pair(), &load), 1);
        assert_eq!(nodes(pair().only_on("judge-00"), &load), 0);
        assert_eq!(nodes(PodPlan::fraction("a", "0.6"), &load), 2);
        load.insert(fleet.uuids("judge-00")[1].to_owned(), (80_321, 0));
        assert_eq!(nodes(PodPlan::memory("a", 1_000), &load), 2);
        assert_eq!(nodes(PodPlan::memory("a", 1_000).only_on("judge-00"), &load), 1);
        assert_eq!(nodes(PodPlan::new("a"), &load), 0, "it requests no GPU");
    }

    #[test]
    fn a_pod_that_has_ended_holds_nothing() {
        let mut pod = bound(PodPlan::fraction("a", "0.5"), HALF);
        pod.status.get_or_insert_default().phase = Some("Succeeded".to_owned());
        assert_eq!(tenancy(&pod, &fleet()), Ok(None));
    }
}
