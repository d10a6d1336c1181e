//! The rows of `gpupack top`: cells of nodes, GPUs and tenants.

use crate::cli::base::plain::Mood;
use crate::cli::top::state::{GpuItem, NodeItem, TenantItem};

/// Cells of the bar that shows the tenants of a GPU.
const BAR_CELLS: u64 = 8;

/// Shades of the bar: tenants use them in rotation; the last one is free room.
const SHADES: [char; 4] = ['█', '▓', '▒', '·'];
const ASCII_SHADES: [char; 4] = ['#', '=', '%', '.'];

/// Prefixes of product names to leave out.
const VENDORS: [&str; 3] = ["NVIDIA ", "Tesla ", "GeForce "];

/// One whole GPU, in millionths.
const WHOLE: u64 = 1_000_000;

/// A kind of row.
pub(crate) trait Row: serde::Serialize {
    /// The kind of a list of them in JSON.
    const KIND: &'static str;
    /// Titles of the columns; the last is the state.
    const TITLES: &'static [&'static str];
    /// The columns that are numbers.
    const RIGHT: &'static [usize];
    /// The cells.
    fn cells(&self, no_unicode: bool) -> Vec<String>;
    /// The state, for its color.
    fn mood(&self) -> Mood;
}

impl Row for NodeItem {
    const KIND: &'static str = "NodeList";
    const TITLES: &'static [&'static str] =
        &["NAME", "MODEL", "GPUS", "EMPTY", "SHARE", "MEM", "USED", "FREE-MAX", "PODS", "STATE"];
    const RIGHT: &'static [usize] = &[2, 3, 4, 5, 6, 7, 8];

    fn cells(&self, _no_unicode: bool) -> Vec<String> {
        let devices = u64::try_from(self.gpus).unwrap_or(u64::MAX);
        let model = match self.models.as_slice() {
            [] => "-".to_owned(),
            [one] => short(one),
            [first, others @ ..] => format!("{}+{}", short(first), others.len()),
        };
        vec![
            self.name.clone(),
            model,
            self.gpus.to_string(),
            self.empty_gpus.to_string(),
            percent(self.booked_share_millionths, devices.saturating_mul(WHOLE)),
            percent(self.booked_mib, self.capacity_mib),
            used(self.used_mib, self.capacity_mib),
            share(self.largest_free_share_millionths),
            self.tenants.to_string(),
            match (self.state.as_str(), self.overbooked_gpus, self.unhealthy_gpus) {
                ("reporting", 0, 0) => "ok".to_owned(),
                ("reporting", 0, ill) => format!("unhealthy:{ill}"),
                ("reporting", over, _) => format!("overbooked:{over}"),
                (state, _, _) => state.to_owned(),
            },
        ]
    }

    fn mood(&self) -> Mood {
        match self.state.as_str() {
            _ if self.overbooked_gpus + self.unhealthy_gpus > 0 => Mood::Bad,
            "reporting" => Mood::Good,
            _ => Mood::Odd,
        }
    }
}

impl Row for GpuItem {
    const KIND: &'static str = "GpuList";
    const TITLES: &'static [&'static str] =
        &["NODE", "GPU", "MODEL", "SHARE", "MEM", "USED", "FREE", "PODS", "BAR", "STATE"];
    const RIGHT: &'static [usize] = &[1, 3, 4, 5, 6, 7];

    fn cells(&self, no_unicode: bool) -> Vec<String> {
        let model = match &self.profile {
            Some(profile) => format!("{} {profile}", short(&self.model)),
            None => short(&self.model),
        };
        vec![
            self.node.clone(),
            self.index.to_string(),
            model,
            share(self.booked_share_millionths),
            percent(self.booked_mib, self.capacity_mib),
            used(self.used_mib, self.capacity_mib),
            share(self.free_share_millionths),
            self.tenants.to_string(),
            bar(&self.shares, if no_unicode { ASCII_SHADES } else { SHADES }),
            self.state.clone(),
        ]
    }

    fn mood(&self) -> Mood {
        match self.state.as_str() {
            "ok" | "mig" => Mood::Good,
            "silent" | "never_reported" | "gone" | "KubeletOwned" => Mood::Odd,
            _ => Mood::Bad,
        }
    }
}

impl Row for TenantItem {
    const KIND: &'static str = "TenantList";
    const TITLES: &'static [&'static str] =
        &["NAMESPACE", "POD", "NODE", "GPU", "SHARE", "MEM", "USED", "HELD-BY", "STATE"];
    const RIGHT: &'static [usize] = &[3, 4, 5, 6];

    fn cells(&self, _no_unicode: bool) -> Vec<String> {
        vec![
            self.namespace.clone(),
            self.pod.clone(),
            self.node.clone(),
            self.gpu_index.to_string(),
            share(self.share_millionths),
            gib(self.memory_mib),
            self.used_mib.map_or_else(|| "-".to_owned(), gib),
            self.protection_verified.clone(),
            match self.used_mib {
                Some(used) if used > self.memory_mib => "over".to_owned(),
                Some(_) | None if self.state == "confirmed" => "ok".to_owned(),
                Some(_) | None => self.state.clone(),
            },
        ]
    }

    fn mood(&self) -> Mood {
        match self.used_mib {
            Some(used) if used > self.memory_mib => Mood::Bad,
            Some(_) | None if self.state == "confirmed" => Mood::Good,
            Some(_) | None => Mood::Odd,
        }
    }
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
    fn a_bar_has_eight_cells_whatever_it_shows() {
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
