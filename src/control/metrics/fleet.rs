//! Families of the fleet: allocated, free and stranded amounts, by model and pool.

use std::collections::BTreeMap;

use prometheus::{Gauge, GaugeVec, IntGaugeVec};

use crate::metrics::make::{Make, bytes, count, ratio};
use engine::scoring::device_figures::{
    DeviceCondition, DeviceFigures, FREE_STEPS, SIZES, TENANT_STEPS,
};
use engine::scoring::fragmentation::PackingSums;
use wire::ids::{ModelName, PoolName};
use wire::units::Share;

/// Most pairs of model and pool with their own series; the rest is [`OTHER`].
const MOST_KINDS: usize = 200;

/// The label of everything without its own series.
pub(crate) const OTHER: &str = "other";

/// Labels of every series of a model in a pool.
const KIND: [&str; 2] = ["model", "pool"];

/// The state of the fleet.
#[derive(Clone, Debug, Default)]
pub struct FleetFigures {
    /// How full and fragmented the whole fleet is.
    pub packing: PackingSums,
    /// The figures of each model in each pool.
    pub kinds: BTreeMap<(ModelName, PoolName), DeviceFigures>,
    /// Nodes by the state of their agent.
    pub nodes: NodeCounts,
}

pub(crate) struct FleetFamilies {
    nodes: IntGaugeVec,
    efficiency: Gauge,
    fragmentation: Gauge,
    gpus: IntGaugeVec,
    overallocated: IntGaugeVec,
    occupied: IntGaugeVec,
    fullness: GaugeVec,
    by_free_share: IntGaugeVec,
    by_tenants: IntGaugeVec,
    share: GaugeVec,
    largest_share: GaugeVec,
    largest_memory: GaugeVec,
    fitting: IntGaugeVec,
    stranded: GaugeVec,
}

impl FleetFamilies {
    /// Makes all families. Those by model and pool have no series before there are devices.
    pub(crate) fn new(make: &Make<'_>) -> Self {
        let families = Self {
            nodes: make.int_gauges("gpupack_nodes", "Nodes by the state of their agent.", &["state"]),
            efficiency: make.gauge("gpupack_packing_efficiency_ratio",
                "Mean fullness of the occupied GPUs: the larger of allocated share and allocated memory.",
            ),
            fragmentation: make.gauge("gpupack_fragmentation_ratio",
                "Mean part of the free compute share that a typical request cannot use.",
            ),
            gpus: make.int_gauges("gpupack_gpus", "Devices, each in one state.", &with(KIND, "state")),
            overallocated: make.int_gauges("gpupack_gpus_overallocated",
                "Devices on which facts from outside put more than they have.",
                &KIND,
            ),
            occupied: make.int_gauges("gpupack_gpus_occupied", "Devices with tenants.", &KIND),
            fullness: make.gauges("gpupack_gpus_fullness",
                "Sum over the devices with tenants of the larger of allocated share and allocated memory: \
                 over gpupack_gpus_occupied it is the packing efficiency.",
                &KIND,
            ),
            by_free_share: make.int_gauges("gpupack_gpus_by_free_share",
                "Devices that accept tenants, by free compute share in tenths, rounded down.",
                &with(KIND, "free"),
            ),
            by_tenants: make.int_gauges("gpupack_gpus_by_tenants",
                "Devices that accept tenants, by number of tenants.",
                &with(KIND, "tenants"),
            ),
            share: make.gauges("gpupack_share_gpus",
                "Compute share in GPUs, each part in one state: the sum is the capacity.",
                &with(KIND, "state"),
            ),
            largest_share: make.gauges("gpupack_largest_fit_share_gpus",
                "Largest compute share of one GPU that fits now.",
                &KIND,
            ),
            largest_memory: make.gauges("gpupack_largest_fit_bytes",
                "Largest memory of one GPU that fits now.",
                &KIND,
            ),
            fitting: make.int_gauges("gpupack_fitting_requests",
                "Requests of this size that would fit now, if all free room went to them.",
                &with(KIND, "size"),
            ),
            stranded: make.gauges("gpupack_stranded_bytes",
                "Free memory of devices on which no request of this size fits.",
                &with(KIND, "size"),
            ),
        };
        families.show(&FleetFigures::default());
        families
    }

    /// Sets all gauges. Models and pools that are gone lose their series.
    pub(crate) fn show(&self, fleet: &FleetFigures) {
        let NodeCounts { reporting, not_reporting, never } = fleet.nodes;
        for (state, value) in
            [("reporting", reporting), ("not_reporting", not_reporting), ("never", never)]
        {
            self.nodes.with_label_values(&[state]).set(value);
        }
        self.efficiency.set(ratio(fleet.packing.efficiency()));
        self.fragmentation.set(ratio(fleet.packing.fragmentation()));
        let by_kind = [
            &self.gpus,
            &self.overallocated,
            &self.occupied,
            &self.by_free_share,
            &self.by_tenants,
            &self.fitting,
        ];
        by_kind.into_iter().for_each(IntGaugeVec::reset);
        let by_kind = [
            &self.fullness,
            &self.share,
            &self.largest_share,
            &self.largest_memory,
            &self.stranded,
        ];
        by_kind.into_iter().for_each(GaugeVec::reset);
        let mut others = DeviceFigures::default();
        for (at, ((model, pool), figures)) in fleet.kinds.iter().enumerate() {
            if at < MOST_KINDS {
                self.show_kind([model.as_str(), pool.as_str()], figures);
            } else {
                others.add(figures);
            }
        }
        if fleet.kinds.len() > MOST_KINDS {
            self.show_kind([OTHER, OTHER], &others);
        }
    }

    fn show_kind(&self, kind: [&str; 2], figures: &DeviceFigures) {
        for (state, devices) in DeviceCondition::ALL.into_iter().zip(figures.devices) {
            self.gpus.with_label_values(&with(kind, state.name())).set(count(devices));
        }
        self.overallocated.with_label_values(&kind).set(count(figures.overallocated));
        let (occupied, fullness) = figures.occupied;
        self.occupied.with_label_values(&kind).set(count(occupied));
        self.fullness.with_label_values(&kind).set(ratio(Share::from_millionths(fullness)));
        for (step, devices) in figures.by_free_share.into_iter().enumerate() {
            self.by_free_share.with_label_values(&with(kind, FREE[step])).set(count(devices));
        }
        for (step, devices) in figures.by_tenants.into_iter().enumerate() {
            self.by_tenants.with_label_values(&with(kind, TENANTS[step])).set(count(devices));
        }
        let share = figures.share;
        for (state, part) in [
            ("allocated", share.allocated),
            ("stranded", share.stranded),
            ("free", share.free),
            ("unavailable", share.unavailable),
        ] {
            self.share.with_label_values(&with(kind, state)).set(ratio(part));
        }
        self.largest_share.with_label_values(&kind).set(ratio(figures.largest_share));
        self.largest_memory.with_label_values(&kind).set(bytes(figures.largest_memory));
        for (size, room) in SIZES.into_iter().zip(figures.room) {
            self.fitting.with_label_values(&with(kind, size.name)).set(count(room.fitting));
            self.stranded.with_label_values(&with(kind, size.name)).set(bytes(room.stranded));
        }
    }
}

/// The labels of a kind, or their names, and one more.
fn with<'a>(kind: [&'a str; 2], more: &'a str) -> [&'a str; 3] {
    [kind[0], kind[1], more]
}

/// Labels of free share in tenths, rounded down.
const FREE: [&str; FREE_STEPS] =
    ["0", "0.1", "0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "1"];

/// Labels of numbers of tenants.
const TENANTS: [&str; TENANT_STEPS] = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "more"];

/// Nodes by the state of their agent, for the gauge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeCounts {
    /// The agent reports in time.
    pub reporting: i64,
    /// The agent no longer reports.
    pub not_reporting: i64,
    /// The agent has not reported since the start of the extender.
    pub never: i64,
}
