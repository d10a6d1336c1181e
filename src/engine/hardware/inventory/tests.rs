//! Which inventories are accepted.

use super::*;
use wire::device::DeviceIndex;
use wire::ids::{MigProfile, ModelName};
use wire::units::MemMib;

fn gpu(id: &str, index: u32, total: u64, reserved: u64) -> Device {
    Device {
        id: DeviceId::new(id).unwrap(),
        index: DeviceIndex(index),
        model: ModelName::new("NVIDIA H200"),
        total: MemMib::new(total),
        reserved: MemMib::new(reserved),
        kind: DeviceKind::Gpu,
        health: Health::Healthy,
    }
}

#[test]
fn an_inventory_is_sorted_by_index() {
    let inventory =
        NodeInventory::new(vec![gpu("GPU-b", 1, 100, 0), gpu("GPU-a", 0, 100, 1)]).unwrap();
    let ids: Vec<_> = inventory.devices().iter().map(|d| d.id.as_str()).collect();
    assert_eq!(ids, ["GPU-a", "GPU-b"]);
    assert_eq!(inventory.devices()[0].capacity(), MemMib::new(99));
}

#[test]
fn absurd_inventories_are_rejected_with_the_offending_value() {
    let twice = vec![gpu("GPU-a", 0, 100, 0), gpu("GPU-a", 1, 100, 0)];
    let mut orphan = gpu("MIG-a", 0, 100, 0);
    orphan.kind = DeviceKind::MigInstance {
        parent: DeviceId::new("GPU-x").unwrap(),
        profile: MigProfile::new("1g.10gb"),
    };
    let many = (0..300).map(|i| gpu(&format!("GPU-{i}"), i, 100, 0)).collect();
    for (devices, part) in [
        (twice, "`GPU-a` is reported twice"),
        (vec![gpu("GPU-a", 0, 100, 101)], "reserve of `101 MiB`"),
        (vec![gpu("GPU-a", 0, u64::MAX, 0)], "18446744073709551615"),
        (vec![orphan], "`GPU-x`"),
        (many, "`300` devices"),
    ] {
        let message = NodeInventory::new(devices).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
}
