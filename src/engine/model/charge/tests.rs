use proptest::prelude::*;

use super::*;
use crate::hardware::device_class::{ClassKind, DeviceClass};
use wire::device::ModelFilter;
use wire::ids::ModelName;

fn share(millionths: u64) -> Share {
    Share::from_millionths(millionths)
}

fn price(model: &str, memory: u64, weight: u64) -> ModelPrice {
    ModelPrice { model: model.to_owned(), memory: MemMib::new(memory), weight: share(weight) }
}

fn prices() -> Prices {
    Prices {
        reference: MemMib::new(80_000),
        models: vec![price("H100", 80_000, 1_000_000), price("A10", 24_000, 250_000)],
        replicas: BTreeSet::new(),
    }
}

/// Share, memory, devices and equivalents.
fn counts(request: &GpuRequest) -> (u64, u64, u64, u64) {
    let Charge { share, memory, devices, equivalents } = prices().charge(request);
    (share, memory, devices, equivalents)
}

fn with(amount: Amount, count: u32, models: &[&str]) -> GpuRequest {
    let models = ModelFilter::new(models.iter().copied());
    GpuRequest { models, ..GpuRequest::several(amount, NonZeroU32::new(count).unwrap()) }
}

fn mig(profile: &str) -> Amount {
    Amount::MigInstance(MigProfile::new(profile))
}

#[test]
fn each_form_of_request_counts_in_each_dimension() {
    let one = |amount| counts(&with(amount, 1, &[]));
    let half = share(500_000);
    for (amount, expected) in [
        (Amount::Fraction(half), (500_000, 40_000, 1, 500_000)),
        (Amount::Fraction(share(1)), (1, 1, 1, 1)),
        (Amount::Memory(MemMib::new(1)), (13, 1, 1, 13)),
        (Amount::Memory(MemMib::new(100_000)), (1_000_000, 100_000, 1, 1_000_000)),
        (Amount::FractionAndMemory(half, MemMib::new(8_000)), (500_000, 40_000, 1, 500_000)),
        (Amount::FractionAndMemory(half, MemMib::new(60_000)), (750_000, 60_000, 1, 750_000)),
        (Amount::Whole, (1_000_000, 80_000, 1, 1_000_000)),
        (mig("1g.10gb"), (142_858, 10_240, 1, 142_858)),
        (mig("3g.40gb"), (428_572, 40_960, 1, 428_572)),
        (mig("7g.80gb"), (1_000_000, 81_920, 1, 1_000_000)),
        (mig("1g.6gb"), (250_000, 6_144, 1, 250_000)),
        (mig("9g.80gb"), (1_000_000, 81_920, 1, 1_000_000)),
        (mig("all"), (1_000_000, 80_000, 1, 1_000_000)),
        (mig("0g.1gb"), (1_000_000, 80_000, 1, 1_000_000)),
    ] {
        assert_eq!(one(amount.clone()), expected, "{amount:?}");
    }
    assert_eq!(counts(&with(Amount::Whole, 8, &[])), (8_000_000, 640_000, 8, 8_000_000));
    assert_eq!(counts(&with(Amount::Fraction(half), 3, &[])), (1_500_000, 120_000, 3, 1_500_000));
    assert_eq!(one(Amount::SharedSlot), (1_000_000, 80_000, 1, 1_000_000), "no pool has slots");
}

#[test]
fn parts_count_as_the_slots_that_they_take() {
    let prices =
        Prices { replicas: [3, 4].map(|count| Replicas::new(count).unwrap()).into(), ..prices() };
    let one = |amount| {
        let Charge { share, memory, .. } = prices.charge(&GpuRequest::one(amount));
        (share, memory)
    };
    assert_eq!(one(Amount::SharedSlot), (333_334, 26_667), "of the fewest");
    assert_eq!(one(Amount::Fraction(share(1))), (333_334, 26_667));
    assert_eq!(one(Amount::Memory(MemMib::new(1))), (333_334, 26_667));
    assert_eq!(one(Amount::Fraction(share(400_000))), (666_667, 53_334), "two of three");
    assert_eq!(one(Amount::Memory(MemMib::new(56_000))), (1_000_000, 80_000), "three of either");
    assert_eq!(one(Amount::Whole), (1_000_000, 80_000));
    assert_eq!(one(mig("1g.10gb")), (142_858, 10_240));
}

#[test]
fn a_pod_that_may_get_a_whole_instance_counts_as_one_at_least() {
    let may = |amount| {
        let (share, memory, ..) =
            counts(&GpuRequest { by_instance: true, ..GpuRequest::one(amount) });
        (share, memory)
    };
    assert_eq!(may(Amount::Memory(MemMib::new(1))), (142_858, 10_000));
    assert_eq!(may(Amount::Memory(MemMib::new(10_001))), (285_715, 20_000));
    assert_eq!(may(Amount::Memory(MemMib::new(70_000))), (1_000_000, 80_000));
}

#[test]
fn an_instance_counts_as_that_of_the_dearest_model_that_may_have_it() {
    let share_of = |profile: &str, models: &[&str]| counts(&with(mig(profile), 1, models)).0;
    assert_eq!(share_of("1g.24gb", &[]), 250_000, "an RTX PRO 6000 has four");
    assert_eq!(share_of("1g.24gb", &["H100"]), 142_858);
    assert_eq!(share_of("1g.24gb", &["NVIDIA RTX PRO 6000 Blackwell Server Edition"]), 250_000);
    assert_eq!(share_of("1g.24gb", &["H100", "RTX PRO 6000"]), 250_000);
    for (profile, share) in
        [("4g.96gb.gfx", 1_000_000), ("2g.48gb.me.all", 500_000), ("1g.6gb.me", 250_000)]
    {
        assert_eq!(share_of(profile, &[]), share, "{profile}");
    }
}

#[test]
fn a_pod_alone_on_an_instance_counts_as_one() {
    let alone = |amount| {
        let (share, memory, ..) =
            counts(&GpuRequest { isolation: Isolation::Hardware, ..GpuRequest::one(amount) });
        (share, memory)
    };
    assert_eq!(alone(Amount::Memory(MemMib::new(1))), (142_858, 10_000));
    assert_eq!(alone(Amount::Memory(MemMib::new(10_001))), (285_715, 20_000));
    assert_eq!(alone(Amount::Memory(MemMib::new(40_000))), (571_429, 40_000));
    assert_eq!(alone(Amount::Memory(MemMib::new(40_001))), (1_000_000, 80_000));
    assert_eq!(alone(Amount::Fraction(share(900_000))), (1_000_000, 80_000));
    assert_eq!(alone(Amount::SharedSlot), (1_000_000, 80_000));
    assert_eq!(alone(mig("1g.10gb")), (142_858, 10_240));
}

#[test]
fn a_pod_counts_as_the_dearest_model_that_it_may_get() {
    let on = |models: &[&str]| {
        let (share, memory, _, equivalents) = counts(&with(Amount::Whole, 1, models));
        (share, memory, equivalents)
    };
    let dear = (1_000_000, 80_000, 1_000_000);
    assert_eq!(on(&["A10"]), (1_000_000, 24_000, 250_000));
    assert_eq!(on(&["nvidia-a10"]), (1_000_000, 24_000, 250_000));
    assert_eq!(on(&["A10", "H100"]), dear);
    assert_eq!(on(&["A10", "NVIDIA"]), dear, "the second name may be any model");
    assert_eq!(on(&["A100"]), dear, "no model with a price");
    let both = Prices {
        models: vec![price("L40", 48_000, 500_000), price("L40 S", 60_000, 800_000)],
        ..prices()
    };
    let charge = both.charge(&with(Amount::Whole, 1, &["L40"]));
    assert_eq!((charge.memory, charge.equivalents), (60_000, 800_000), "it may be either");
    let charge = both.charge(&with(Amount::Whole, 1, &["S"]));
    assert_eq!(charge.memory, 80_000, "or any other with this word");
    assert_eq!(on(&[]), dear);
    let (memory_share, ..) = counts(&with(Amount::Memory(MemMib::new(12_000)), 1, &["A10"]));
    assert_eq!(memory_share, 500_000);
    assert!(prices().are_weighted() && !Prices::default().are_weighted());
}

proptest! {
    #[test]
    fn a_charge_covers_what_is_allocated_on_the_reference(
        millionths in 1_u64..=1_000_000,
        mib in 1_u64..=100_000,
        gpu in 1_000_u64..=100_000,
        which in 0..3,
        count in 1_u32..=64,
        replicas in prop::option::of((2_u32..=64).prop_map(|count| Replicas::new(count).unwrap())),
        others in prop::collection::btree_set((2_u32..=64).prop_map(|count| Replicas::new(count).unwrap()), 0..3),
    ) {
        let amount = match which {
            0 => Amount::Fraction(share(millionths)),
            1 => Amount::Memory(MemMib::new(mib)),
            _ => Amount::FractionAndMemory(share(millionths), MemMib::new(mib)),
        };
        let class = DeviceClass {
            model: ModelName::new("NVIDIA A100"),
            capacity: MemMib::new(gpu),
            kind: ClassKind::Gpu,
            replicas,
            part: None,
        };
        let request = with(amount, count, &[]);
        let replicas = others.into_iter().chain(replicas).collect();
        let prices = Prices { reference: MemMib::new(gpu), replicas, ..Prices::default() };
        let charge = prices.charge(&request);
        prop_assert!(charge.devices == u64::from(count) && charge.share > 0 && charge.memory > 0);
        if let Ok(demand) = request.demand_on(&class) {
            let times = u64::from(count);
            prop_assert!(charge.share >= times * demand.share.millionths());
            prop_assert!(charge.memory >= times * demand.memory.mib());
        }
    }
}

#[test]
fn an_instance_that_a_name_of_a_model_means_is_paid_for() {
    let of = |models: &[&str]| {
        let alone = with(Amount::Memory(MemMib::new(64)), 1, models);
        let (share, memory, ..) =
            counts(&GpuRequest { isolation: Isolation::Hardware, ..alone.clone() });
        let by_rule = counts(&GpuRequest { by_instance: true, ..alone });
        assert_eq!((share, memory), (by_rule.0, by_rule.1), "{models:?}");
        (share, memory)
    };
    let (smallest, whole) = ((142_858, 10_000), (1_000_000, 80_000));
    for (models, expected) in [
        (&[][..], smallest),
        (&["H100"], smallest),
        (&["NVIDIA A100-SXM4-80GB"], smallest),
        (&["MIG 1g.10gb"], (142_858, 10_240)),
        (&["NVIDIA H100 80GB HBM3 MIG 3g.40gb"], (428_572, 40_960)),
        (&["MIG 7g.80gb"], (1_000_000, 81_920)),
        (&["7g.80gb"], (1_000_000, 81_920)),
        (&["H100", "MIG 7g.80gb"], (1_000_000, 81_920)),
        (&["mig 9g"], whole),
        (&["MIG 9g.900gb+me"], whole),
    ] {
        assert_eq!(of(models), expected, "{models:?}");
    }
    assert!(of(&["7g"]).0 == 1_000_000 && of(&["MIG"]).0 == 1_000_000);
}
