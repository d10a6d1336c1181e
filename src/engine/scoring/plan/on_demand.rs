//! MIG instances that are made on demand: where there is room for one, and what becomes of it.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::hardware::device_class::DeviceClasses;
use crate::hardware::inventory::NodeInventory;
use crate::hardware::pool::{MigUse, PoolRule};
use crate::hardware::spots::DividedGpu;
use crate::ledger::suggest::displacement::{Clearing, clearings};
use crate::model::device_state::Origin;
use crate::model::event::{LedgerEvent, StateBefore};
use crate::model::node_state::InstanceOrders;
use crate::model::policy::Policy;
use crate::model::reservation::{PlacedDevice, Reservation, ReservationState};
use crate::scoring::cost::Ties;
use crate::scoring::lacking::{lacking, lacks_there};
use crate::scoring::node_fixture;
use crate::scoring::node_fixture::{compiled, compiled_request, mix, tenant};
use wire::device::{Device, DeviceDetails, DeviceIndex, DeviceKind, Health, MakeableProfile, Slot};
use wire::ids::{DeviceId, MigProfile, ModelName, NodeName, PoolName};
use wire::seen::DeviceUse;
use wire::units::{Demand, HostAmount, MemMib, Share, Timestamp};

/// One MIG instance: name, profile, start, size, and whether gpupack made it.
pub(crate) type Instance<'a> = (&'a str, &'a str, u32, u32, bool);

/// Two A30 in MIG mode with these instances on the first one, or on the second if its name begins with `MIG-b`.
pub(crate) fn inventory(instances: &[Instance<'_>]) -> NodeInventory {
    inventory_of("NVIDIA A30", instances)
}

/// The same of GPUs of this model.
fn inventory_of(model: &str, instances: &[Instance<'_>]) -> NodeInventory {
    let gpus = ["GPU-a", "GPU-b"];
    let gpu = Device {
        id: id("GPU"),
        index: DeviceIndex(0),
        model: ModelName::new(model),
        total: MemMib::new(24_576),
        reserved: MemMib::ZERO,
        kind: DeviceKind::MigParent,
        health: Health::Healthy,
    };
    let both = gpus.iter().zip(0..);
    let both =
        both.map(|(name, at)| Device { id: id(name), index: DeviceIndex(at), ..gpu.clone() });
    let mut devices: Vec<Device> = both.collect();
    let makeable = DeviceDetails {
        mig_profiles: vec![
            profile("1g.6gb", 5_952, 1, &[0, 1, 2, 3]),
            profile("1g.6gb+me", 5_952, 1, &[0, 1, 2, 3]),
            profile("2g.12gb", 11_968, 2, &[0, 2]),
            profile("4g.24gb", 24_000, 4, &[0]),
        ],
        ..DeviceDetails::default()
    };
    let mut details = BTreeMap::from(gpus.map(|name| (id(name), makeable.clone())));
    for (name, profile, start, size, is_made) in instances {
        let parent = if name.starts_with("MIG-b") { id("GPU-b") } else { id("GPU-a") };
        let kind = DeviceKind::MigInstance { parent, profile: MigProfile::new(*profile) };
        let total = MemMib::new(5_952 * u64::from(*size));
        devices.push(Device { id: id(name), total, kind, ..gpu.clone() });
        let slot = Some(Slot { start: *start, size: *size });
        let more = DeviceDetails { slot, made_here: *is_made, ..DeviceDetails::default() };
        details.insert(id(name), more);
    }
    NodeInventory::placed(devices, &details).unwrap()
}

fn profile(name: &str, memory: u64, size: u32, starts: &[u32]) -> MakeableProfile {
    MakeableProfile {
        profile: MigProfile::new(name),
        memory: MemMib::new(memory),
        sm_count: None,
        size,
        starts: starts.to_vec(),
    }
}

fn id(name: &str) -> DeviceId {
    DeviceId::new(name).unwrap()
}

/// A place on the first GPU.
fn spot(profile: &str, start: u32) -> Spot {
    Spot { gpu: id("GPU-a"), profile: MigProfile::new(profile), start }
}

/// A device that is so, and is not used.
fn idle(name: &str, health: Health) -> DeviceUse {
    DeviceUse { health, ..DeviceUse::idle(id(name)) }
}

/// A node on which gpupack makes instances.
struct Bed {
    node: NodeState,
    classes: DeviceClasses,
}

impl Bed {
    fn new(instances: &[Instance]) -> Self {
        Self::with(&inventory(instances), MigUse::OnDemand)
    }

    /// One with these devices.
    fn with(inventory: &NodeInventory, mig: MigUse) -> Self {
        let mut classes = DeviceClasses::default();
        let mut node = NodeState::new(NodeName::new("n"), MemMib::ZERO);
        node.see_node(HostAmount::ZERO, PoolName::new(""));
        node.share_by(PoolRule { mig, ..PoolRule::default() }, &mut classes);
        node.replace_inventory(inventory, &mut classes);
        node.observe(&[], Timestamp::START);
        Self { node, classes }
    }

    fn see(&mut self, instances: &[Instance]) {
        self.see_all(&inventory(instances));
    }

    /// Its devices are others from now on.
    fn see_all(&mut self, inventory: &NodeInventory) {
        self.node.replace_inventory(inventory, &mut self.classes);
        assert_eq!(self.node.audit(), Ok(()));
    }

    /// The best place for a request.
    fn find(&self, request: &str) -> Result<CostedPlacement, Rejection> {
        let compiled_request = compiled_request(request, &self.classes);
        let mix = compiled("1 whole", &self.node, &self.classes);
        let strategy = Strategy::Policy(Policy::BinPack);
        evaluate(&self.node, &compiled_request, &strategy, &mix, HoldRule::Respected)
    }

    /// Places a pod, and says where.
    fn place(&mut self, pod: &str, request: &str) -> Result<String, Rejection> {
        let placement = placement(&self.node, &self.find(request)?);
        assert!(still_fits(&self.node, &compiled_request(request, &self.classes), &placement));
        let request = node_fixture::request(request).0.map(Into::into);
        self.node.allocate(Reservation { placement, request, ..tenant(pod, Vec::new()) });
        assert_eq!(self.node.audit(), Ok(()));
        Ok(self.of(pod))
    }

    /// The devices of a pod.
    fn of(&self, pod: &str) -> String {
        let held = self.node.reservation(&PodUid::new(pod)).unwrap();
        let ids = held.placement.devices.iter().map(|placed| placed.id.as_str());
        ids.collect::<Vec<_>>().join(" ")
    }

    /// The best place for a request under a policy, with shared GPUs on another node or without any.
    fn find_by(&mut self, policy: Policy, has_shared: bool, request: &str) -> CostedPlacement {
        let shared = node_fixture::node_of("a:24576/24576", &mut self.classes);
        let mix = compiled("1 whole", if has_shared { &shared } else { &self.node }, &self.classes);
        let request = compiled_request(request, &self.classes);
        evaluate(&self.node, &request, &Strategy::Policy(policy), &mix, HoldRule::Respected)
            .unwrap()
    }

    fn removed(&self) -> Vec<DeviceId> {
        self.node.instance_orders().remove
    }

    fn fits(&self, request: &str) -> bool {
        fits(&self.node, &compiled_request(request, &self.classes), HoldRule::Respected)
    }

    /// How many more of each profile fit, one at a time on a copy.
    fn fitting(&self, profile: &str) -> usize {
        let mut bed = Self { node: self.node.clone(), classes: self.classes.clone() };
        let all = (0..)
            .take_while(|at| bed.place(&format!("more-{at}"), &format!("mig={profile}")).is_ok());
        all.count()
    }

    fn origins(&self) -> Vec<(&str, Origin)> {
        let devices = self.node.devices().iter();
        let instances = devices.filter(|device| device.device().kind != DeviceKind::MigParent);
        instances.map(|device| (device.device().id.as_str(), device.origin())).collect()
    }
}

#[test]
fn instances_fit_where_they_may_begin_and_no_other_lies() {
    let mut bed = Bed::new(&[]);
    assert_eq!(["1g.6gb", "2g.12gb", "4g.24gb"].map(|profile| bed.fitting(profile)), [8, 4, 2]);
    assert_eq!(bed.place("p", "mig=2g.12gb").unwrap(), "GPU-a/0/2g-12gb");
    let held = bed.node.reservation(&PodUid::new("p")).unwrap();
    assert_eq!(held.placement.isolation, ConfiguredIsolation::Hardware);
    assert_eq!(bed.origins(), [("GPU-a/0/2g-12gb", Origin::Promised)]);
    assert_eq!(["1g.6gb", "2g.12gb", "4g.24gb"].map(|profile| bed.fitting(profile)), [6, 3, 1]);
    assert_eq!(bed.place("q", "mig=1g.6gb").unwrap(), "GPU-a/2/1g-6gb", "where others are");
    assert_eq!(["1g.6gb", "2g.12gb", "4g.24gb"].map(|profile| bed.fitting(profile)), [5, 2, 1]);
    assert_eq!(bed.place("w", "mig=4g.24gb").unwrap(), "GPU-b/0/4g-24gb");
    assert_eq!(["1g.6gb", "2g.12gb", "4g.24gb"].map(|profile| bed.fitting(profile)), [1, 0, 0]);
    // Several at a time, and again when pods go.
    bed.node.remove(&PodUid::new("w"));
    assert_eq!(bed.place("s", "mig=2g.12gb count=2").unwrap(), "GPU-b/0/2g-12gb GPU-b/2/2g-12gb");
    assert_eq!(bed.fitting("2g.12gb"), 0);
}

#[test]
fn promised_places_are_kept_together_or_not_at_all() {
    let bed = Bed::new(&[]);
    for (request, promised, is_kept) in [
        ("mig=2g.12gb count=2", &[("2g.12gb", 0), ("2g.12gb", 2)][..], true),
        ("mig=2g.12gb count=2", &[("2g.12gb", 0), ("2g.12gb", 0)], false),
        ("mig=2g.12gb count=2", &[("2g.12gb", 0)], false),
        ("mig=2g.12gb", &[("2g.12gb", 0), ("2g.12gb", 2)], false),
        ("mig=2g.12gb", &[("2g.12gb", 1)], false), // none begins there
        ("mig=2g.12gb", &[], false),
        ("mig=1g.6gb.me", &[("1g.6gb+me", 3)], true),
        ("mig=1g.6gb.me count=2", &[("1g.6gb+me", 0), ("1g.6gb+me", 1)], false),
    ] {
        let spots = promised.iter().map(|(profile, start)| spot(profile, *start));
        let spots: Vec<Spot> = spots.collect();
        let found = on_spots(&bed.node, &compiled_request(request, &bed.classes), &spots);
        let expected = is_kept.then(|| spots.iter().cloned().map(Some).collect::<Vec<_>>());
        assert_eq!(found.map(|placement| placement.spots), expected, "{request} {promised:?}");
    }
}

#[test]
fn one_instance_of_a_gpu_has_the_media_engines() {
    let mut bed = Bed::new(&[]);
    assert_eq!(bed.fitting("1g.6gb.me"), 2);
    assert_eq!(bed.place("p", "mig=1g.6gb.me").unwrap(), "GPU-a/0/1g-6gb-me");
    assert_eq!((bed.fitting("1g.6gb.me"), bed.fitting("1g.6gb")), (1, 7));
    let mut bed = Bed::new(&[]);
    let both = bed.place("p", "mig=1g.6gb.me count=2").unwrap();
    assert_eq!(both, "GPU-a/0/1g-6gb-me GPU-b/0/1g-6gb-me");
    let mut bed = Bed::new(&[]);
    let three = bed.place("p", "mig=1g.6gb.me count=3");
    assert_eq!(three, Err(Rejection::DevicesTaken { fitting: 2 }));
}

#[test]
fn what_covers_an_instance_is_named() {
    let mut bed = Bed::new(&[]);
    bed.place("p", "mig=1g.6gb count=8").unwrap();
    assert_eq!(bed.place("q", "mig=1g.6gb"), Err(Rejection::NoPlace));
}

#[test]
fn an_instance_that_no_pod_has_is_removed_and_given_to_none() {
    let made = ("MIG-1", "2g.12gb", 0, 2, true);
    let mut bed = Bed::new(&[made]);
    bed.node.observe(&[DeviceUse::idle(id("MIG-1"))], Timestamp::START);
    assert_eq!(bed.removed(), [id("MIG-1")]);
    assert_eq!(bed.place("p", "mig=2g.12gb").unwrap(), "GPU-a/0/2g-12gb", "not the old one");
    assert_eq!(bed.removed(), [id("MIG-1")]);
    assert_eq!(bed.node.instance_orders().make, [], "first that one goes");
    // The old one is there still, gone, and the new one is there.
    for (instances, uuid) in [
        (&[made][..], "GPU-a/0/2g-12gb"),
        (&[], "GPU-a/0/2g-12gb"),
        (&[("MIG-2", "2g.12gb", 0, 2, true)], "MIG-2"),
    ] {
        bed.see(instances);
        assert_eq!(bed.of("p"), uuid);
        let made = bed.node.instance_orders().make;
        let places: Vec<(u32, &str)> =
            made.iter().map(|spot| (spot.start, spot.profile.as_str())).collect();
        let is_ordered = instances.is_empty();
        assert_eq!(places, if is_ordered { vec![(0, "2g.12gb")] } else { vec![] });
    }
    assert_eq!(bed.node.instance_orders(), InstanceOrders::default(), "it has a tenant");
}

#[test]
fn an_instance_stays_with_its_pod_when_the_agent_forgets_that_it_made_it() {
    let mut bed = Bed::new(&[]);
    bed.place("p", "mig=4g.24gb").unwrap();
    bed.see(&[("MIG-1", "4g.24gb", 0, 4, true)]);
    bed.see(&[("MIG-1", "4g.24gb", 0, 4, false)]);
    assert_eq!((bed.of("p"), bed.fitting("4g.24gb")), ("MIG-1".to_owned(), 1));
    assert_eq!(bed.node.instance_orders(), InstanceOrders::default());
    // After a boot it was made again, and the agent has forgotten that, too.
    bed.see(&[]);
    assert_eq!(bed.of("p"), "GPU-a/0/4g-24gb");
    bed.see(&[("MIG-2", "4g.24gb", 0, 4, false)]);
    assert_eq!(bed.of("p"), "MIG-2");
    bed.see(&[("MIG-1", "4g.24gb", 0, 4, true)]);
    // The same UUID at another place is another instance.
    bed.see(&[("MIG-1", "2g.12gb", 0, 2, false)]);
    assert_eq!(bed.of("p"), "GPU-a/0/4g-24gb");
}

#[test]
fn an_instance_that_another_pod_names_is_given_to_none() {
    let mut bed = Bed::new(&[("MIG-1", "4g.24gb", 0, 4, false)]);
    let demand = bed.node.devices().iter().find(|device| device.device().id.as_str() == "MIG-1");
    let demand = Demand { memory: demand.unwrap().capacity().memory, share: Share::WHOLE };
    let id = id("MIG-1");
    bed.node.allocate(tenant("q", vec![PlacedDevice { id, demand }]));
    bed.see(&[]);
    for at in 0..2 {
        bed.place(&format!("p{at}"), "mig=4g.24gb").unwrap();
    }
    let promised = ["p0", "p1"].map(|pod| bed.of(pod));
    assert!(promised.contains(&"GPU-a/0/4g-24gb".to_owned()), "{promised:?}");
    bed.see(&[("MIG-1", "4g.24gb", 0, 4, true)]); // by its UUID it is that of `q`
    assert_eq!((["p0", "p1"].map(|pod| bed.of(pod)), bed.of("q")), (promised, "MIG-1".to_owned()));
}

#[test]
fn an_idle_instance_at_a_promised_place_goes_before_another_is_made() {
    let mut bed = Bed::new(&[]);
    bed.place("p", "mig=2g.12gb").unwrap();
    let held = bed.node.reservation(&PodUid::new("p")).unwrap().clone();
    // A process that starts knows the pod by the UUID of before a boot, and the instance that is there now.
    let there = [("MIG-2", "2g.12gb", 0, 2, true)];
    let mut bed = Bed::new(&there);
    bed.node.observe(&[DeviceUse::idle(id("MIG-2"))], Timestamp::START);
    let mut written = held.placement.clone();
    written.devices[0].id = id("MIG-1");
    bed.node.allocate(Reservation { placement: written.clone(), ..held });
    let shown = |bed: &Bed| {
        let InstanceOrders { make, remove, .. } = bed.node.instance_orders();
        (make.len(), remove.len(), bed.of("p"))
    };
    assert_eq!(shown(&bed), (0, 1, "GPU-a/0/2g-12gb".to_owned()));
    bed.see(&[]);
    assert_eq!(shown(&bed), (1, 0, "GPU-a/0/2g-12gb".to_owned()));
    // Another process has written the new UUID: this one is the pod's.
    let mut bed = Bed::new(&there);
    bed.place("p", "mig=2g.12gb").unwrap();
    let mut placement = bed.node.reservation(&PodUid::new("p")).unwrap().placement.clone();
    bed.node.take_written(&mut placement, &written);
    assert_eq!(placement.devices[0].id.as_str(), "GPU-a/0/2g-12gb", "that one is gone");
    written.devices[0].id = id("MIG-2");
    bed.node.take_written(&mut placement, &written);
    assert_eq!(placement.devices[0].id.as_str(), "MIG-2");
}

#[test]
fn pods_that_wait_hear_of_a_place_for_an_instance() {
    let mut bed = Bed::new(&[]);
    let grows = |bed: &mut Bed, change: &dyn Fn(&mut Bed)| {
        let before = StateBefore::of(&bed.node);
        change(bed);
        let is_same = before.is_that_of(&bed.node);
        let events = before.events(&bed.node);
        assert!(!is_same || events.is_empty());
        events == [LedgerEvent::Room(NodeName::new("n"))]
    };
    for pod in ["p", "q"] {
        assert!(!grows(&mut bed, &|bed| _ = bed.place(pod, "mig=4g.24gb").unwrap()));
    }
    assert!(grows(&mut bed, &|bed| _ = bed.node.remove(&PodUid::new("p"))));
    assert!(!grows(&mut bed, &|bed| {
        bed.node.note_failures([(spot("4g.24gb", 0), None)], Timestamp::START);
    }));
    let limit = std::time::Duration::from_secs(3_600);
    let later = Timestamp::from_millis(61_000);
    assert!(grows(&mut bed, &|bed| _ = bed.node.expire(limit, later)));
    assert!(!grows(&mut bed, &|_| {}));
}

#[test]
fn where_an_instance_could_not_be_made_none_is_for_a_minute() {
    let mut bed = Bed::new(&[]);
    bed.place("p", "mig=4g.24gb").unwrap();
    let spot = bed.node.instance_orders().make.remove(0);
    bed.node.remove(&PodUid::new("p"));
    bed.node.note_failures([(spot, None)], Timestamp::from_millis(1_000));
    assert_eq!((bed.fitting("4g.24gb"), bed.fitting("2g.12gb")), (1, 4));
    let limit = std::time::Duration::from_secs(3_600);
    bed.node.expire(limit, Timestamp::from_millis(60_999));
    assert_eq!(bed.fitting("4g.24gb"), 1);
    assert!(bed.node.is_anything_due(limit, Timestamp::from_millis(61_000)));
    bed.node.expire(limit, Timestamp::from_millis(61_000));
    assert_eq!(bed.fitting("4g.24gb"), 2);
}

#[test]
fn the_units_of_an_instance_that_cannot_be_removed_are_promised_to_no_pod() {
    let mut bed = Bed::new(&[("MIG-1", "2g.12gb", 0, 2, true)]);
    bed.node.observe(&[DeviceUse::idle(id("MIG-1"))], Timestamp::START);
    let fitting = |bed: &Bed| ["1g.6gb", "2g.12gb", "4g.24gb"].map(|profile| bed.fitting(profile));
    assert_eq!(fitting(&bed), [8, 4, 2], "it is to go");
    bed.node.note_held_open(&[id("MIG-1"), id("MIG-unknown")].into());
    assert_eq!((fitting(&bed), bed.node.audit()), ([6, 3, 1], Ok(())));
    assert_eq!(bed.node.instance_orders().remove, [id("MIG-1")], "the agent tries again");
    assert_eq!(bed.place("p", "mig=4g.24gb").unwrap(), "GPU-b/0/4g-24gb");
    assert_eq!(lacks(&bed, "mig=2g.12gb"), Some((0, "GPU-a/2/2g-12gb".to_owned())));
    // What failed because of it can be made as soon as it is gone.
    bed.node.note_failures([(spot("4g.24gb", 0), None)], Timestamp::START);
    assert_eq!(bed.node.held_open_at(&id("GPU-a/0/4g-24gb")), Some(&id("MIG-1")));
    assert_eq!(bed.node.held_open_at(&id("GPU-a/2/2g-12gb")), None);
    let before = StateBefore::of(&bed.node);
    bed.node.note_held_open(&BTreeSet::new());
    assert_eq!(before.events(&bed.node), [LedgerEvent::Room(NodeName::new("n"))]);
    assert_eq!(fitting(&bed), [4, 2, 1]);
}

#[test]
fn an_instance_that_no_inventory_has_closes_all_spots_over_it_at_once() {
    let mut bed = Bed::new(&[]);
    bed.place("p", "mig=1g.6gb").unwrap();
    let spot = bed.node.instance_orders().make.remove(0);
    bed.node.remove(&PodUid::new("p"));
    let hidden = Some(Slot { start: 0, size: 2 });
    bed.node.note_failures([(spot, hidden)], Timestamp::START);
    let fitting = ["1g.6gb", "1g.6gb+me", "2g.12gb", "4g.24gb"].map(|profile| bed.fitting(profile));
    assert_eq!(fitting, [6, 2, 3, 1], "the other GPU, and units 2 and 3 of this one");
}

#[test]
fn a_gpu_on_which_none_could_be_made_is_the_last_choice() {
    let mut bed = Bed::new(&[]);
    let cost = |bed: &Bed| match bed.find("mig=1g.6gb").unwrap().local_cost {
        LocalCost::Ranked(cost) => cost.key(),
        other => panic!("{other:?}"),
    };
    let before = cost(&bed);
    bed.node.note_failures([(spot("1g.6gb", 0), None)], Timestamp::START);
    assert_eq!(cost(&bed), before, "another GPU of the node");
    for (pod, on) in [("p", "GPU-b/0/2g-12gb"), ("q", "GPU-b/2/2g-12gb"), ("r", "GPU-a/0/2g-12gb")]
    {
        assert_eq!(bed.place(pod, "mig=2g.12gb").unwrap(), on);
    }
    assert!(cost(&bed) > before << 1, "any other node comes first");
    bed.node.expire(std::time::Duration::from_secs(3_600), Timestamp::from_millis(60_000));
    assert!(cost(&bed) <= before << 1);
}

#[test]
fn more_important_pods_take_a_place_that_several_others_cover() {
    let mut bed = Bed::new(&[]);
    for pod in ["a", "b", "c", "d"] {
        bed.place(pod, "mig=1g.6gb").unwrap();
    }
    bed.place("w", "mig=4g.24gb").unwrap();
    let compiled = compiled_request("mig=2g.12gb", &bed.classes);
    assert!(!fits(&bed.node, &compiled, HoldRule::Respected));
    let gone = |pods: &[&str]| {
        let pods: Vec<PodUid> = pods.iter().map(|pod| PodUid::new(*pod)).collect();
        fits_without(&bed.node, &compiled, pods.iter())
    };
    assert_eq!([gone(&["a", "b"]), gone(&["b", "c"]), gone(&["c", "d"])], [true, false, true]);
}

#[test]
fn the_pods_are_found_whose_end_makes_a_place() {
    let mut bed = Bed::new(&[]);
    for pod in ["a", "b", "c", "d"] {
        bed.place(pod, "mig=1g.6gb").unwrap();
    }
    bed.place("w", "mig=4g.24gb").unwrap();
    assert_eq!(ways(&bed, "mig=2g.12gb"), ["w 0.976562", "a b 0.484374", "c d 0.484374"]);
    assert_eq!(ways(&bed, "mig=4g.24gb"), ["w 0.976562"], "four pods are too many");
    // An instance of others stays.
    let mut bed = Bed::new(&[("MIG-1", "1g.6gb", 0, 1, false), ("MIG-2", "1g.6gb", 2, 1, true)]);
    bed.place("w", "mig=4g.24gb").unwrap();
    assert_eq!(ways(&bed, "mig=4g.24gb"), ["w 0.976562"]);
}

/// The pods that may end for a request, and what they have.
fn ways(bed: &Bed, request: &str) -> Vec<String> {
    let compiled = compiled_request(request, &bed.classes);
    let ways =
        clearings(&bed.node, &compiled, 3).into_iter().map(|Clearing { pods, moved, .. }| {
            let pods: Vec<&str> = pods.iter().map(PodUid::as_str).collect();
            format!("{} {moved}", pods.join(" "))
        });
    ways.collect()
}

/// What the node lacks of a request, and where room for it is kept.
fn lacks(bed: &Bed, request: &str) -> Option<(u64, String)> {
    let compiled = compiled_request(request, &bed.classes);
    let (lacks, hold) = lacking(&bed.node, &compiled, None)?;
    assert_eq!(lacks_there(&bed.node, &compiled, &hold), Some(lacks));
    let ids = hold.placement.devices.iter().map(|placed| placed.id.as_str());
    Some((lacks, ids.collect::<Vec<_>>().join(" ")))
}

#[test]
fn room_is_kept_where_the_fewest_units_have_to_become_free() {
    let mut bed = Bed::new(&[]);
    for (pod, request) in [("a", "mig=1g.6gb"), ("b", "mig=4g.24gb"), ("c", "mig=2g.12gb")] {
        bed.place(pod, request).unwrap();
    }
    assert_eq!(
        ["a", "b", "c"].map(|pod| bed.of(pod)),
        ["GPU-a/0/1g-6gb", "GPU-b/0/4g-24gb", "GPU-a/2/2g-12gb"]
    );
    let found = |lacks: u64, ids: &str| Some((lacks, ids.to_owned()));
    assert_eq!(lacks(&bed, "mig=1g.6gb"), found(0, "GPU-a/1/1g-6gb"));
    assert_eq!(lacks(&bed, "mig=2g.12gb"), found(500_000, "GPU-a/0/2g-12gb"));
    assert_eq!(lacks(&bed, "mig=4g.24gb"), found(750_000, "GPU-a/0/4g-24gb"));
    let all = found(1_500_000, "GPU-a/0/2g-12gb GPU-a/2/2g-12gb");
    assert_eq!(lacks(&bed, "mig=2g.12gb count=2"), all);
    let both = found(1_000_000, "GPU-a/1/1g-6gb.me GPU-b/0/1g-6gb.me".replace('.', "-").as_str());
    assert_eq!(lacks(&bed, "mig=1g.6gb.me count=2"), both, "one of a GPU");
    assert_eq!(lacks(&bed, "mig=2g.12gb count=5"), None);
    assert_eq!(lacks(&bed, "memory=11000 isolation=hardware"), found(500_000, "GPU-a/0/2g-12gb"));
    // Not where others have an instance, or where none could be made a minute ago.
    let mut bed = Bed::new(&[("MIG-1", "1g.6gb", 0, 1, false)]);
    assert_eq!(lacks(&bed, "mig=4g.24gb"), found(0, "GPU-b/0/4g-24gb"));
    bed.place("w", "mig=4g.24gb").unwrap();
    assert_eq!(lacks(&bed, "mig=4g.24gb"), found(1_000_000, "GPU-b/0/4g-24gb"));
    let failed = bed.node.instance_orders().make;
    bed.node.note_failures(failed.into_iter().map(|spot| (spot, None)), Timestamp::START);
    assert_eq!(lacks(&bed, "mig=4g.24gb"), None);
}

#[test]
fn kept_units_are_given_to_no_other_pod_and_its_own_when_all_are_free() {
    let mut bed = Bed::new(&[]);
    for pod in ["a", "b", "c", "d"] {
        bed.place(pod, "mig=1g.6gb").unwrap();
    }
    bed.place("w", "mig=4g.24gb").unwrap();
    let waiting = PodUid::new("waiting");
    let request = compiled_request("mig=2g.12gb", &bed.classes);
    let stand = |bed: &mut Bed| {
        let (lacks, hold) = lacking(&bed.node, &request, None).unwrap();
        bed.node.stand(waiting.clone(), hold);
        assert_eq!(bed.node.audit(), Ok(()));
        lacks
    };
    assert_eq!(stand(&mut bed), 1_000_000);
    // The instances of the pods are made meanwhile, also one where the room is kept.
    let ours = |uuid, start| (uuid, "1g.6gb", start, 1, true);
    bed.see(&[ours("MIG-a", 0), ours("MIG-b", 1), ours("MIG-c", 2), ours("MIG-d", 3)]);
    bed.node.remove(&PodUid::new("b"));
    bed.see(&[ours("MIG-a", 0), ours("MIG-c", 2), ours("MIG-d", 3)]);
    assert!(!bed.fits("mig=1g.6gb"), "it is kept");
    let ordered = bed.node.instance_orders().make;
    assert_eq!(ordered.iter().map(|spot| spot.gpu.as_str()).collect::<Vec<_>>(), ["GPU-b"]);
    bed.node.remove(&PodUid::new("c"));
    assert!(!bed.fits("mig=2g.12gb") && bed.fits("mig=1g.6gb"), "this one is not");
    bed.node.remove(&PodUid::new("a"));
    let mut own = bed.node.clone();
    own.stand_down(&waiting);
    assert!(fits(&own, &request, HoldRule::Respected));
    bed.node.stand_down(&waiting);
    assert_eq!(bed.place("waiting", "mig=2g.12gb").unwrap(), "GPU-a/0/2g-12gb");
}

#[test]
fn an_instance_at_kept_units_is_that_of_the_pod_which_has_to_end_first() {
    let mut bed = Bed::new(&[]);
    for pod in ["v", "w"] {
        bed.place(pod, "mig=4g.24gb").unwrap();
    }
    let request = compiled_request("mig=4g.24gb", &bed.classes);
    let (_, hold) = lacking(&bed.node, &request, None).unwrap();
    assert_eq!(hold.placement.devices[0].id.as_str(), "GPU-a/0/4g-24gb");
    let waiting = PodUid::new("waiting");
    bed.node.stand(waiting.clone(), hold.clone());
    let made = [("MIG-v", "4g.24gb", 0, 4, true)];
    bed.see(&made);
    assert_eq!((bed.of("v").as_str(), &bed.node.standing_holds()[&waiting]), ("MIG-v", &hold));
    bed.node.remove(&PodUid::new("v"));
    bed.node.observe(&[DeviceUse::idle(id("MIG-v"))], Timestamp::START);
    assert_eq!(bed.node.instance_orders().remove.len(), 1, "then it goes");
    assert_eq!(bed.fitting("4g.24gb"), 0);
    let before = StateBefore::of(&bed.node);
    bed.node.stand_down(&waiting);
    assert_eq!(bed.fitting("4g.24gb"), 1);
    let room = LedgerEvent::Room(bed.node.name().clone());
    assert_eq!(before.events(&bed.node), [room], "others that wait are tried");
}

#[test]
fn any_instance_with_enough_memory_is_made_for_isolation_by_hardware() {
    let mut bed = Bed::new(&[]);
    for (request, on) in [
        ("memory=6000 isolation=hardware", "GPU-a/0/2g-12gb"),
        ("memory=5952 isolation=hardware", "GPU-a/2/1g-6gb"),
        ("memory=20000 isolation=hardware", "GPU-b/0/4g-24gb"),
    ] {
        assert_eq!(bed.place(request, request).unwrap(), on, "{request}");
    }
}

#[test]
fn an_instance_gets_its_uuid_once_it_is_made_and_another_one_after_a_reboot() {
    let mut bed = Bed::new(&[]);
    bed.place("p", "mig=2g.12gb").unwrap();
    for (uuid, instances) in [
        ("GPU-a/0/2g-12gb", &[][..]),
        ("MIG-1", &[("MIG-1", "2g.12gb", 0, 2, true)]),
        ("GPU-a/0/2g-12gb", &[]), // a reboot
        ("MIG-2", &[("MIG-2", "2g.12gb", 0, 2, true)]),
    ] {
        bed.see(instances);
        assert_eq!((bed.of("p").as_str(), bed.fitting("2g.12gb")), (uuid, 3));
        let state = bed.node.devices().iter().find(|device| device.device().id.as_str() == uuid);
        let state = state.unwrap();
        assert_eq!(state.allocated(), state.capacity(), "{uuid}: all of it");
    }
    // An instance that others made there is not the pod's.
    bed.see(&[("MIG-3", "1g.6gb", 0, 1, false)]);
    assert_eq!(bed.of("p"), "GPU-a/0/2g-12gb");
    // Nor is it given to another one, which would keep the pod from its place.
    assert_eq!(bed.fitting("1g.6gb"), 2 + 4);
    bed.node.remove(&PodUid::new("p"));
    assert_eq!(bed.fitting("1g.6gb"), 4 + 4);
}

#[test]
fn an_instance_of_others_stays_and_one_of_ours_goes_for_a_better_use() {
    let mut bed = Bed::new(&[("MIG-1", "1g.6gb", 0, 1, false)]);
    assert_eq!(bed.fitting("4g.24gb"), 1);
    assert_eq!(bed.place("p", "mig=1g.6gb").unwrap(), "MIG-1", "it can be used");
    let mut bed = Bed::new(&[("MIG-1", "1g.6gb", 0, 1, true)]);
    assert_eq!(bed.fitting("4g.24gb"), 2);
    assert_eq!(bed.fitting("1g.6gb"), 8, "it counts once");
    assert_eq!(bed.place("w", "mig=4g.24gb count=2").unwrap(), "GPU-a/0/4g-24gb GPU-b/0/4g-24gb");
    assert_eq!(bed.fitting("1g.6gb"), 0, "it is to be removed");
    // While a process uses it, it stays.
    let mut bed = Bed::new(&[("MIG-1", "1g.6gb", 0, 1, true)]);
    let used = DeviceUse { used: Some(MemMib::new(100)), ..DeviceUse::idle(id("MIG-1")) };
    bed.node.observe(&[used], Timestamp::START);
    assert_eq!(bed.fitting("4g.24gb"), 1);
}

#[test]
fn an_idle_instance_that_kubelet_hands_out_stays() {
    let mut bed = Bed::new(&[("MIG-1", "1g.6gb", 0, 1, true)]);
    for (health, removed) in
        [(Health::KubeletOwned, 0), (Health::Unhealthy, 0), (Health::Healthy, 1)]
    {
        bed.node.observe(&[idle("MIG-1", health)], Timestamp::START);
        assert_eq!(bed.node.instance_orders().remove.len(), removed, "{health:?}");
        assert_eq!(bed.fitting("4g.24gb"), 1 + removed);
    }
}

/// An earlier leader may have ordered an instance there for a pod that has ended, and still runs.
#[test]
fn nothing_is_made_on_a_gpu_before_a_report_names_it() {
    let mut bed = Bed::new(&[]);
    bed.node.wait_for_use(&[]);
    assert_eq!(bed.fitting("1g.6gb"), 0);
    bed.node.observe(&[DeviceUse::idle(id("GPU-b"))], Timestamp::START);
    assert_eq!(bed.fitting("1g.6gb"), 4);
    bed.node.observe(&[DeviceUse::idle(id("GPU-a"))], Timestamp::START);
    assert_eq!(bed.fitting("1g.6gb"), 8);
}

#[test]
fn nothing_is_made_in_other_pools_or_on_a_gpu_that_is_ill() {
    let mut bed = Bed::new(&[]);
    bed.node.share_by(PoolRule::default(), &mut bed.classes);
    assert_eq!(bed.place("p", "mig=1g.6gb"), Err(Rejection::Kind));
    let mut bed = Bed::new(&[]);
    bed.node.observe(&[idle("GPU-a", Health::Unhealthy)], Timestamp::START);
    assert_eq!(bed.fitting("1g.6gb"), 4);
    bed.node.observe(&[idle("GPU-b", Health::Unhealthy)], Timestamp::START);
    assert_eq!(bed.place("p", "mig=1g.6gb"), Err(Rejection::Unhealthy));
}

#[test]
fn a_pod_that_ended_before_its_instance_was_made_leaves_nothing() {
    let mut bed = Bed::new(&[]);
    bed.place("p", "mig=2g.12gb").unwrap();
    let draining =
        ReservationState::Draining { since: Timestamp::START, clean_reports: 0, shown: None };
    let held = bed.node.reservation(&PodUid::new("p")).unwrap().clone();
    bed.node.allocate(Reservation { state: draining, ..held });
    let uses = ["GPU-a", "GPU-b"].map(|name| DeviceUse::idle(id(name)));
    let freed: Vec<usize> =
        (0..2).map(|_| bed.node.observe(&uses, Timestamp::START).len()).collect();
    assert_eq!((freed, bed.fitting("4g.24gb")), (vec![0, 1], 2));
    assert_eq!(bed.node.devices().len(), 2);
}

#[test]
fn an_instance_is_made_where_it_wastes_least() {
    // A unit of the second half is taken, so the first half stays whole.
    // With shared GPUs on another node, and without any.
    let cases =
        [(Policy::Fragmentation, true), (Policy::Fragmentation, false), (Policy::BinPack, true)];
    for (policy, has_shared) in cases {
        let mut bed = Bed::new(&[("MIG-1", "1g.6gb", 2, 1, false)]);
        bed.node.observe(&[idle("MIG-1", Health::KubeletOwned)], Timestamp::START);
        let gpus: Vec<DividedGpu> =
            bed.node.divided(HoldRule::Ignored).map(|(_, gpu)| gpu).collect();
        assert_eq!(gpus.len(), 2);
        let requests = mix("1 mig=2g.12gb");
        let shared = node_fixture::node_of("a:24576/24576", &mut bed.classes);
        let mix = compiled("1 whole", if has_shared { &shared } else { &bed.node }, &bed.classes);
        let mix = mix.clone().with_divided(&requests, &gpus, &mix);
        let request = compiled_request("mig=1g.6gb", &bed.classes);
        let strategy = Strategy::Policy(policy);
        let place = evaluate(&bed.node, &request, &strategy, &mix, HoldRule::Respected).unwrap();
        let placement = placement(&bed.node, &place);
        assert_eq!(placement.devices[0].id.as_str(), "GPU-a/3/1g-6gb", "{policy:?} {has_shared}");
    }
}

/// No costs are known of a model without a table.
#[test]
fn of_equal_places_that_with_the_fewest_free_units_on_its_gpu_is_taken() {
    let cases =
        [(Policy::Fragmentation, true), (Policy::Fragmentation, false), (Policy::BinPack, true)];
    for (policy, has_shared) in cases {
        let there = [("MIG-1", "1g.6gb", 0, 1, false), ("MIG-b1", "2g.12gb", 0, 2, false)];
        let mut bed = Bed::with(&inventory_of("NVIDIA A39", &there), MigUse::OnDemand);
        let in_use = ["MIG-1", "MIG-b1"].map(|name| idle(name, Health::KubeletOwned));
        bed.node.observe(&in_use, Timestamp::START);
        let place = bed.find_by(policy, has_shared, "mig=1g.6gb");
        let taken = placement(&bed.node, &place);
        assert_eq!(taken.devices[0].id.as_str(), "GPU-b/2/1g-6gb", "{policy:?} {has_shared}");
        // Of two nodes.
        let ties = |pods: &[&str]| {
            let mut bed = Bed::with(&inventory_of("NVIDIA A39", &[]), MigUse::OnDemand);
            pods.iter().for_each(|request| _ = bed.place(request, request).unwrap());
            ties_of(&bed.find_by(policy, has_shared, "mig=1g.6gb"))
        };
        let (empty, one) = (ties(&[]), ties(&["mig=2g.12gb"]));
        let two = ties(&["mig=2g.12gb", "mig=1g.6gb"]);
        assert!(one < empty && two < one, "{policy:?}");
        // One that is there takes no free units.
        let idle = [("MIG-1", "1g.6gb", 0, 1, false)];
        let mut bed = Bed::with(&inventory_of("NVIDIA A39", &idle), MigUse::Fixed);
        let there = ties_of(&bed.find_by(policy, has_shared, "mig=1g.6gb"));
        assert!(there < two, "{policy:?}");
    }
}

fn ties_of(place: &CostedPlacement) -> Ties {
    match place.local_cost {
        LocalCost::WasteChange(_, _, ties) => ties,
        LocalCost::Ranked(cost) => cost.ties(),
    }
}

/// The version before switched the MIG mode of GPUs, and called one that was to leave it `whole`.
#[test]
fn a_pod_that_the_version_before_gave_a_gpu_keeps_it() {
    for is_named_whole in [false, true] {
        let mut devices = inventory(&[]).devices().to_vec();
        devices[0].kind = DeviceKind::Gpu;
        let mut bed = Bed::with(&NodeInventory::new(devices).unwrap(), MigUse::OnDemand);
        let spot = Spot { gpu: id("GPU-a"), profile: MigProfile::new("whole"), start: 0 };
        let demand = Demand { memory: MemMib::new(24_576), share: Share::WHOLE };
        let held = Placement {
            node: NodeName::new("n"),
            devices: vec![PlacedDevice { id: id("GPU-a"), demand }],
            isolation: ConfiguredIsolation::None,
            guest: None,
            spots: if is_named_whole { vec![Some(spot)] } else { Vec::new() },
        };
        bed.node.allocate(Reservation { placement: held, ..tenant("s", Vec::new()) });
        bed.see(&[]); // others put it into MIG mode
        bed.see(&[("MIG-b1", "1g.6gb", 0, 1, true)]);
        assert_eq!(bed.of("s"), "GPU-a");
        assert!(bed.node.devices()[0].tenants().contains_key(&PodUid::new("s")));
        assert_eq!(bed.node.audit(), Ok(()));
    }
}
