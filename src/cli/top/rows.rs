//! The rows of `gpupack top`: cells of nodes, GPUs, tenants and teams.

use crate::base::failure::Failure;
use crate::base::plain::{Mood, json};
use crate::top::sums::Sums;
use wire::api::commands::{DeviceItem, DeviceList, NodeList, TenantItem, TenantList};
use wire::api::kind::{ApiVersion, DeviceListKind, NodeListKind, TeamListKind, TenantListKind};
use wire::api::page::{Team, TeamList};
use wire::api::state::{
    DeviceKind, Health, InstanceState, MemoryHolder, Node, NodeReporting, PodState, Tenant,
};

/// Cells of the bar that shows the tenants of a GPU.
const BAR_CELLS: u64 = 8;

/// What stands for a pod that the user may not see.
const HIDDEN: &str = "(another team)";

/// Shades of the bar: tenants use them in rotation; the last one is free room.
const SHADES: [char; 4] = ['█', '▓', '▒', '·'];
const ASCII_SHADES: [char; 4] = ['#', '=', '%', '.'];

/// Prefixes of product names to leave out.
const VENDORS: [&str; 3] = ["NVIDIA ", "Tesla ", "GeForce "];

/// One whole GPU, in millionths.
const WHOLE: u64 = 1_000_000;

/// A kind of row.
pub(crate) trait TopRow: Sized {
    /// Titles of the columns; the last is the state.
    const TITLES: &'static [&'static str];
    /// The columns that are numbers.
    const RIGHT: &'static [usize];
    /// The cells.
    fn cells(&self, no_unicode: bool) -> Vec<String>;
    /// The state, for its color.
    fn mood(&self) -> Mood;
    /// The rows as JSON.
    ///
    /// # Errors
    /// Those of [`json`].
    fn json(items: Vec<Self>) -> Result<String, Failure>;
}

impl TopRow for Node {
    const TITLES: &'static [&'static str] =
        &["NAME", "MODEL", "GPUS", "EMPTY", "SHARE", "MEM", "USED", "FREE-MAX", "PODS", "STATE"];
    const RIGHT: &'static [usize] = &[2, 3, 4, 5, 6, 7, 8];

    fn cells(&self, _no_unicode: bool) -> Vec<String> {
        let sums = Sums::of(self);
        let devices = u64::try_from(sums.gpus).unwrap_or(u64::MAX);
        let mut models = sums.models.iter();
        let model = match (models.next(), models.len()) {
            (None, _) => "-".to_owned(),
            (Some(one), 0) => short(one),
            (Some(first), others) => format!("{}+{others}", short(first)),
        };
        vec![
            self.name.clone(),
            model,
            sums.gpus.to_string(),
            sums.empty.to_string(),
            percent(sums.allocated.share_millionths, devices.saturating_mul(WHOLE)),
            percent(sums.allocated.memory_mib, sums.capacity_mib),
            used(sums.used_mib, sums.capacity_mib),
            share(sums.largest_free_share_millionths),
            sums.tenants.to_string(),
            match (self.state, sums.overallocated, sums.unhealthy) {
                (NodeReporting::Reporting, 0, 0) => "ok".to_owned(),
                (NodeReporting::Reporting, 0, ill) => format!("Unhealthy:{ill}"),
                (NodeReporting::Reporting, over, _) => format!("Overallocated:{over}"),
                (state, _, _) => format!("{state:?}"),
            },
        ]
    }

    fn mood(&self) -> Mood {
        let sums = Sums::of(self);
        match self.state {
            _ if sums.overallocated + sums.unhealthy > 0 => Mood::Bad,
            NodeReporting::Reporting => Mood::Good,
            NodeReporting::NeverReported | NodeReporting::NotReporting | NodeReporting::Gone => {
                Mood::Odd
            }
        }
    }

    fn json(items: Vec<Self>) -> Result<String, Failure> {
        json(&NodeList { api_version: ApiVersion::default(), kind: NodeListKind::default(), items })
    }
}

impl TopRow for DeviceItem {
    const TITLES: &'static [&'static str] =
        &["NODE", "GPU", "MODEL", "SHARE", "MEM", "USED", "FREE", "PODS", "BAR", "STATE"];
    const RIGHT: &'static [usize] = &[1, 3, 4, 5, 6, 7];

    fn cells(&self, no_unicode: bool) -> Vec<String> {
        let device = &self.device;
        let model = match &device.mig_profile {
            Some(profile) => {
                let start = device.mig_placement.filter(|_| device.instance.is_some());
                let start = start.map(|slot| format!("@{}", slot.start)).unwrap_or_default();
                format!("{} {profile}{start}", short(&device.model))
            }
            None => short(&device.model),
        };
        let tenants = device.tenants.iter();
        let shares: Vec<u64> = tenants.map(|tenant| tenant.allocated.share_millionths).collect();
        vec![
            self.node.clone(),
            device.index.to_string(),
            model,
            share(device.allocated.share_millionths),
            percent(device.allocated.memory_mib, device.capacity_mib),
            used(device.used_mib, device.capacity_mib),
            share(device.free.share_millionths),
            match device.guests.len() {
                0 => device.tenants.len().to_string(),
                guests => format!("{}+{guests}", device.tenants.len()),
            },
            bar(&shares, if no_unicode { ASCII_SHADES } else { SHADES }),
            match (self.node_state, device.health, device.fault) {
                (NodeReporting::Reporting, Health::Healthy, _) if device.overallocated => {
                    "Overallocated".to_owned()
                }
                (NodeReporting::Reporting, Health::Healthy, _) => match device.kind {
                    DeviceKind::MigParent => "Mig".to_owned(),
                    DeviceKind::Gpu | DeviceKind::MigInstance => match device.instance {
                        None | Some(InstanceState::Made) => "ok".to_owned(),
                        Some(state) => format!("{state:?}"),
                    },
                },
                (NodeReporting::Reporting, Health::Unhealthy, Some(fault)) => format!("{fault:?}"),
                (NodeReporting::Reporting, health, _) => format!("{health:?}"),
                (state, _, _) => format!("{state:?}"),
            },
        ]
    }

    fn mood(&self) -> Mood {
        match (self.node_state, self.device.health) {
            (NodeReporting::Reporting, Health::Healthy) if !self.device.overallocated => Mood::Good,
            (NodeReporting::Reporting, Health::Healthy | Health::Unhealthy) => Mood::Bad,
            (_, _) => Mood::Odd,
        }
    }

    fn json(items: Vec<Self>) -> Result<String, Failure> {
        let (api_version, kind) = (ApiVersion::default(), DeviceListKind::default());
        json(&DeviceList { api_version, kind, items })
    }
}

impl TopRow for TenantItem {
    const TITLES: &'static [&'static str] = &[
        "NAMESPACE",
        "POD",
        "NODE",
        "GPU",
        "SHARE",
        "REQUEST",
        "LIMIT",
        "USED",
        "HELD BY",
        "STATE",
    ];
    const RIGHT: &'static [usize] = &[3, 4, 5, 6, 7];

    fn cells(&self, _no_unicode: bool) -> Vec<String> {
        let tenant = &self.tenant;
        let unnamed = if tenant.pod_uid.is_empty() { HIDDEN } else { tenant.pod_uid.as_str() };
        let (namespace, name) = tenant.pod.split_once('/').unwrap_or(("", unnamed));
        vec![
            namespace.to_owned(),
            name.to_owned(),
            self.node.clone(),
            self.device_index.to_string(),
            share(tenant.allocated.share_millionths),
            gib(tenant.allocated.memory_mib),
            gib(tenant.limit_mib.unwrap_or(tenant.allocated.memory_mib)),
            tenant.used_mib.map_or_else(|| "-".to_owned(), gib),
            tenant.isolation.held_by.map_or("-", MemoryHolder::words).to_owned(),
            match tenant.state {
                _ if is_over(tenant) => "Over".to_owned(),
                PodState::Confirmed if tenant.runs_on.is_some() => "Guest".to_owned(),
                PodState::Confirmed => "ok".to_owned(),
                state => format!("{state:?}"),
            },
        ]
    }

    fn mood(&self) -> Mood {
        match self.tenant.state {
            _ if is_over(&self.tenant) => Mood::Bad,
            PodState::Confirmed => Mood::Good,
            PodState::Waiting | PodState::Assumed | PodState::Draining => Mood::Odd,
        }
    }

    fn json(items: Vec<Self>) -> Result<String, Failure> {
        let (api_version, kind) = (ApiVersion::default(), TenantListKind::default());
        json(&TenantList { api_version, kind, items })
    }
}

/// Whether a tenant uses more than it may.
fn is_over(tenant: &Tenant) -> bool {
    tenant.used_mib > tenant.limit_mib.or(Some(tenant.allocated.memory_mib))
}

/// A product name without its vendor.
fn short(model: &str) -> String {
    let plain =
        VENDORS.iter().fold(model, |name, vendor| name.strip_prefix(vendor).unwrap_or(name));
    plain.replace(' ', "-")
}

/// Part of a GPU to two decimals; a small remainder is not shown as zero.
fn share(millionths: u64) -> String {
    match (millionths, millionths.saturating_add(5_000) / 10_000) {
        (0, _) => "0".to_owned(),
        (_, 0) => "<.01".to_owned(),
        (_, hundredths) => format!("{}.{:02}", hundredths / 100, hundredths % 100),
    }
}

fn percent(part: u64, whole: u64) -> String {
    match whole {
        0 => "-".to_owned(),
        _ => {
            let rounded = (u128::from(part) * 100 + u128::from(whole) / 2) / u128::from(whole);
            format!("{rounded}%")
        }
    }
}

impl TopRow for Team {
    const TITLES: &'static [&'static str] =
        &["TEAM", "GUARANTEED", "AT-MOST", "USED", "OVER-QUOTA", "PODS", "WAITING", "STATE"];
    const RIGHT: &'static [usize] = &[1, 2, 3, 4, 5, 6];

    fn cells(&self, _no_unicode: bool) -> Vec<String> {
        let at_most = self.at_most_millionths.map_or_else(|| "-".to_owned(), share);
        vec![
            self.team.clone(),
            share(self.guaranteed_millionths),
            at_most,
            share(self.used_millionths),
            share(self.over_quota_millionths),
            self.pods.to_string(),
            self.waiting.to_string(),
            state_of_team(self).to_owned(),
        ]
    }

    fn mood(&self) -> Mood {
        if is_owed(self) { Mood::Odd } else { Mood::Good }
    }

    fn json(items: Vec<Self>) -> Result<String, Failure> {
        json(&TeamList { api_version: ApiVersion::default(), kind: TeamListKind::default(), items })
    }
}

/// Whether its pods wait although it has less than is guaranteed to it.
fn is_owed(team: &Team) -> bool {
    team.waiting > 0 && team.used_millionths < team.guaranteed_millionths
}

fn state_of_team(team: &Team) -> &'static str {
    let is_full = team.at_most_millionths.is_some_and(|most| team.used_millionths >= most);
    match (is_owed(team), is_full, team.over_quota_millionths > 0) {
        (true, ..) => "BelowGuarantee",
        (_, true, _) => "AtLimit",
        (.., true) => "OverQuota",
        (false, false, false) => "ok",
    }
}

fn used(used_mib: Option<u64>, capacity_mib: u64) -> String {
    used_mib.map_or_else(|| "-".to_owned(), |used| percent(used, capacity_mib))
}

fn gib(mib: u64) -> String {
    let tenths = mib.saturating_mul(10).saturating_add(512) / 1_024;
    format!("{}.{}Gi", tenths / 10, tenths % 10)
}

/// Eight cells: each tenant has as many as its share, at least one while cells are left.
fn bar(shares: &[u64], shades: [char; 4]) -> String {
    let [inks @ .., free] = shades;
    let mut cells = String::new();
    let (mut drawn, mut sum) = (0, 0_u64);
    for (share, ink) in shares.iter().zip(inks.iter().cycle()) {
        sum = sum.saturating_add(*share);
        let end = sum.saturating_mul(BAR_CELLS).saturating_add(WHOLE / 2) / WHOLE;
        let end = end.max(drawn + 1).min(BAR_CELLS);
        for _ in drawn..end {
            cells.push(*ink);
        }
        drawn = end.max(drawn);
    }
    for _ in drawn..BAR_CELLS {
        cells.push(free);
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_always_has_eight_cells() {
        for (shares, expected) in [
            (vec![], "........"),
            (vec![500_000], "####...."),
            (vec![500_000, 250_000], "####==.."),
            (vec![1, 1, 1], "#=%....."),
            (vec![1_000_000], "########"),
            (vec![100_000; 10], "#=%#=%#="),
            (vec![900_000, 900_000, u64::MAX], "#######="),
        ] {
            assert_eq!(bar(&shares, ASCII_SHADES), expected, "{shares:?}");
        }
    }

    #[test]
    fn the_limit_of_a_tenant_is_what_it_may_use_or_else_what_it_is_allocated() {
        let cells = |tenant: serde_json::Value| {
            let tenant = serde_json::from_value(tenant).unwrap();
            let (node, device_id) = ("n1".to_owned(), "GPU-a".to_owned());
            let cells = TenantItem { node, device_index: 0, device_id, tenant }.cells(true);
            let at = |title| TenantItem::TITLES.iter().position(|known| *known == title).unwrap();
            [at("REQUEST"), at("LIMIT"), at("USED"), at("STATE")].map(|at| cells[at].clone())
        };
        let mut tenant = serde_json::json!({"podUid": "u", "pod": "team/nb", "state": "Confirmed",
            "allocated": {"shareMillionths": 500_000, "memoryMib": 20_480},
            "isolation": {"configured": "None", "verified": "None"},
            "usedMib": 30_720});
        assert_eq!(cells(tenant.clone()), ["20.0Gi", "20.0Gi", "30.0Gi", "Over"]);
        tenant["limitMib"] = 40_960.into();
        assert_eq!(cells(tenant), ["20.0Gi", "40.0Gi", "30.0Gi", "ok"]);
    }

    #[test]
    fn cells_are_short() {
        assert_eq!(
            (share(0), share(1), share(333_330)),
            ("0".into(), "<.01".into(), "0.33".into())
        );
        assert_eq!((share(1_000_000), share(2_250_000)), ("1.00".into(), "2.25".into()));
        assert_eq!((percent(1, 3), percent(1, 0)), ("33%".into(), "-".into()));
        assert_eq!(short("NVIDIA A100-SXM4-80GB"), "A100-SXM4-80GB");
        assert_eq!((short("Tesla T4"), short("NVIDIA L4")), ("T4".into(), "L4".into()));
    }
}
