use super::*;
use crate::hardware::device_class::DeviceClasses;
use crate::hardware::units::{HostAmount, MemMib, Share, Timestamp};
use crate::ledger::fixture::{bound, ledger, node};
use crate::model::fit::HostRule;
use crate::model::request::{Amount, GpuRequest};

/// What node `n` lacks of a request, and the devices that lack least.
fn lacks(used: &[(&str, u64)], request: GpuRequest) -> Option<(u64, Vec<String>)> {
    let ledger = ledger("A B C");
    for (at, (device, millionths)) in used.iter().enumerate() {
        ledger.see_pod(&bound(&format!("p{at}"), "n", device, *millionths), Timestamp::START);
    }
    let classes: DeviceClasses = ledger.cluster().classes.clone();
    let compiled =
        CompiledRequest::new(Some(request), HostAmount::ZERO, HostRule::Trusted, &classes);
    let (lacks, hold) = lacking(&node(&ledger, "n"), &compiled)?;
    assert_eq!(lacks_there(&node(&ledger, "n"), &compiled, &hold), Some(lacks));
    let ids = hold.placement.devices.iter().map(|placed| placed.id.as_str().to_owned());
    Some((lacks, ids.collect()))
}

fn whole(count: u32) -> GpuRequest {
    GpuRequest::several(Amount::Whole, count.try_into().unwrap())
}

#[test]
fn the_devices_that_lack_least_are_kept() {
    let used = [("A", 700_000), ("B", 200_000), ("C", 300_000)];
    let ids = |ids: &[&str]| ids.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(lacks(&used, whole(1)), Some((200_000, ids(&["B"]))));
    assert_eq!(lacks(&used, whole(2)), Some((500_000, ids(&["B", "C"]))));
    assert_eq!(lacks(&used, whole(3)), Some((1_200_000, ids(&["A", "B", "C"]))));
    assert_eq!(lacks(&used, whole(4)), None, "there are three");
    let half = GpuRequest::one(Amount::Fraction(Share::from_millionths(500_000)));
    assert_eq!(lacks(&used, half), Some((0, ids(&["B"]))), "it fits now");
    let memory = GpuRequest::one(Amount::Memory(MemMib::new(900)));
    assert_eq!(lacks(&used, memory), Some((100_000, ids(&["B"]))));
    let large = GpuRequest::one(Amount::Memory(MemMib::new(1_001)));
    assert_eq!(lacks(&used, large), None, "not even an empty device would do");
}
