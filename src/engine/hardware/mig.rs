//! Which MIG instances each model can have, and which of them fit on one GPU together.
//!
//! A GPU in MIG mode is divided into units (4 on an A30, 12 on an RTX PRO 6000, else 8). An instance covers a run of
//! units, which may begin only where its profile allows. Memory is divided like the units, compute
//! is not: on Hopper the smallest profile with twice the memory has 26 of 132 multiprocessors.
//!
//! A node's report wins over this table: an instance is sound whose profile, start and size NVML lists for its
//! GPU. The table finds other reports that cannot be, and gives the part of a GPU's compute that an instance
//! has. Any report is accepted for a model that is not listed.
//!
//! Sources: NVIDIA's MIG User Guide (profiles, placements), and public captures of
//! `nvidia-smi mig -lgip` and `-lgipp` (memory: A30 under driver 535, A100 80 GB, H100 NVL under
//! 560, GH200, and eight H200 in an issue of mig-parted). Memory varies by some percent with the
//! driver. Starts on H200 are inferred from H100.
//!
//! Not listed, as no complete capture is known: GH200 with 144 GB, B200, GB200 (memory of `3g`, `4g` and `7g`, and on
//! the last two their multiprocessors), B300 and GB300 (all memory and multiprocessors), and RTX PRO 5000 (also the
//! starts). The board's memory is known for B200 alone. NVIDIA's guide has the profiles of B200 and RTX PRO 5000, as
//! parts of the GPU. An entry needs them all: its last profile is the measure of the whole GPU.
//! For these GPUs the list of NVML gives a geometry: see [`crate::hardware::listed`].

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use crate::hardware::device_class::GpuPart;
use wire::device::{Device, DeviceDetails, DeviceKind, ModelFilter, Slot};
use wire::ids::{DeviceId, MigProfile, ModelName};
use wire::units::{MemMib, Share};

/// One MIG profile of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// Its name, without a variant.
    pub name: String,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Usable memory in MiB.
    pub memory_mib: u64,
    /// Units at which it may begin.
    pub starts: Vec<u32>,
    /// How many units it covers.
    pub size: u32,
    /// What may follow its name: variants at the same places, such as the one with media engines.
    pub variants: Vec<String>,
}

/// The MIG profiles of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Names of the model, as [`ModelFilter`] reads them; none if it is from a list of NVML.
    pub names: &'static [&'static str],
    /// Memory of the board in MiB, as NVML reports it.
    pub total_mib: u64,
    /// How many units it has.
    pub axis: u32,
    /// Its profiles, small ones first; the last one is the whole GPU.
    pub profiles: Vec<Profile>,
}

/// Beginning of the variants with media engines, `+me` and `+me.all`; one instance of a GPU may have them.
const MEDIA: &str = "+me";

/// Two boards of one name differ in memory by more percent than this, two drivers by less.
const SAME_MEMORY_PERCENT: u64 = 5;

fn profile(
    name: &str,
    multiprocessors: u32,
    memory_mib: u64,
    starts: &[u32],
    size: u32,
) -> Profile {
    let (name, starts) = (name.to_owned(), starts.to_vec());
    Profile { name, multiprocessors, memory_mib, starts, size, variants: Vec::new() }
}

fn with(variants: &[&str], profile: Profile) -> Profile {
    Profile { variants: variants.iter().map(|name| (*name).to_owned()).collect(), ..profile }
}

/// Name and memory of six profiles on eight units: one unit, the same with twice the memory, two,
/// three, four, whole.
type NamedMemory = (&'static str, u64);

fn eight(rows: [NamedMemory; 6], multiprocessors: [u32; 6]) -> Vec<Profile> {
    let [one, wide, two, three, four, all] = rows;
    let of = multiprocessors;
    vec![
        with(&[MEDIA], profile(one.0, of[0], one.1, &[0, 1, 2, 3, 4, 5, 6], 1)),
        profile(wide.0, of[1], wide.1, &[0, 2, 4, 6], 2),
        profile(two.0, of[2], two.1, &[0, 2, 4], 2),
        profile(three.0, of[3], three.1, &[0, 4], 4),
        profile(four.0, of[4], four.1, &[0], 4),
        profile(all.0, of[5], all.1, &[0], 8),
    ]
}

const AMPERE: [u32; 6] = [14, 14, 28, 42, 56, 98];
/// The SXM boards.
const HOPPER: [u32; 6] = [16, 26, 32, 60, 64, 132];

const A100_40: [NamedMemory; 6] = [
    ("1g.5gb", 4_864),
    ("1g.10gb", 9_856),
    ("2g.10gb", 9_856),
    ("3g.20gb", 19_968),
    ("4g.20gb", 19_968),
    ("7g.40gb", 40_192),
];
const A100_80: [NamedMemory; 6] = [
    ("1g.10gb", 9_728),
    ("1g.20gb", 19_968),
    ("2g.20gb", 19_968),
    ("3g.40gb", 40_192),
    ("4g.40gb", 40_192),
    ("7g.80gb", 80_896),
];
const H100_80: [NamedMemory; 6] = [
    ("1g.10gb", 9_984),
    ("1g.20gb", 20_096),
    ("2g.20gb", 20_096),
    ("3g.40gb", 40_448),
    ("4g.40gb", 40_448),
    ("7g.80gb", 81_152),
];
const H100_94: [NamedMemory; 6] = [
    ("1g.12gb", 11_008),
    ("1g.24gb", 22_144),
    ("2g.24gb", 22_144),
    ("3g.47gb", 47_488),
    ("4g.47gb", 47_488),
    ("7g.94gb", 95_360),
];
const H100_96: [NamedMemory; 6] = [
    ("1g.12gb", 11_264),
    ("1g.24gb", 23_552),
    ("2g.24gb", 23_552),
    ("3g.48gb", 47_616),
    ("4g.48gb", 47_616),
    ("7g.96gb", 95_232),
];
const H200: [NamedMemory; 6] = [
    ("1g.18gb", 16_384),
    ("1g.35gb", 33_024),
    ("2g.35gb", 33_024),
    ("3g.71gb", 71_168),
    ("4g.71gb", 71_168),
    ("7g.141gb", 143_104),
];

fn a30() -> Vec<Profile> {
    vec![
        with(&[MEDIA], profile("1g.6gb", 14, 5_952, &[0, 1, 2, 3], 1)),
        with(&[MEDIA], profile("2g.12gb", 28, 11_968, &[0, 2], 2)),
        profile("4g.24gb", 56, 24_000, &[0], 4),
    ]
}

/// Graphics APIs are for `+gfx` alone there, and `-me` is without media engines.
fn rtx_pro_6000() -> Vec<Profile> {
    let (all, media, graphics, plain) = ("+me.all", "+me", "+gfx", "-me");
    vec![
        with(&[media, all, graphics, plain], profile("1g.24gb", 46, 24_192, &[0, 3, 6, 9], 3)),
        with(&[all, graphics, plain], profile("2g.48gb", 94, 48_512, &[0, 6], 6)),
        with(&[graphics], profile("4g.96gb", 188, 97_408, &[0], 12)),
    ]
}

fn geometry(
    names: &'static [&'static str],
    total_mib: u64,
    axis: u32,
    profiles: Vec<Profile>,
) -> Arc<Geometry> {
    Arc::new(Geometry { names, total_mib, axis, profiles })
}

/// The table of all listed models.
pub static GEOMETRIES: LazyLock<[Arc<Geometry>; 8]> = LazyLock::new(|| {
    [
        geometry(&["A30"], 24_576, 4, a30()),
        geometry(&["A100", "A800"], 40_960, 8, eight(A100_40, AMPERE)),
        geometry(&["A100", "A800"], 81_920, 8, eight(A100_80, AMPERE)),
        geometry(&["H100", "H800"], 81_559, 8, eight(H100_80, HOPPER)),
        geometry(&["H100 NVL", "H800 NVL"], 95_830, 8, eight(H100_94, HOPPER)),
        geometry(&["H100", "GH200"], 97_871, 8, eight(H100_96, HOPPER)),
        geometry(&["H200"], 143_771, 8, eight(H200, HOPPER)),
        geometry(&["RTX PRO 6000 Blackwell"], 97_887, 12, rtx_pro_6000()),
    ]
});

impl Geometry {
    /// The geometry of a GPU, by its product name and then by the nearest memory. `None` if the
    /// model is not listed, or if no listed board of its name has this memory.
    pub fn of(model: &ModelName, total: MemMib) -> Option<&'static Arc<Self>> {
        let named = GEOMETRIES.iter().filter(|known| known.is_named(model));
        let apart = named.map(|known| (known.total_mib.abs_diff(total.mib()), known));
        let near = apart.filter(|(apart, known)| {
            apart.saturating_mul(100) <= known.total_mib * SAME_MEMORY_PERCENT
        });
        near.min_by_key(|(apart, _)| *apart).map(|(_, known)| known)
    }

    fn is_named(&self, model: &ModelName) -> bool {
        ModelFilter::new(self.names.iter().copied()).matches(model)
    }

    /// The geometry of the GPU of an instance with this much usable memory. `None` if the model is not
    /// listed.
    pub fn of_instance(
        model: &ModelName,
        profile: &MigProfile,
        usable: MemMib,
    ) -> Option<&'static Arc<Self>> {
        let named = GEOMETRIES.iter().filter(|known| known.is_named(model));
        let known = named.filter_map(|known| Some((known, known.profile(profile)?.memory_mib)));
        let apart = known.map(|(known, mib)| (mib.abs_diff(usable.mib()), known, mib));
        let (apart, known, mib) = apart.min_by_key(|(apart, ..)| *apart)?;
        (apart * 100 <= mib * SAME_MEMORY_PERCENT).then_some(known)
    }

    /// Whether a GPU of a model that is accepted may have this geometry.
    pub fn may_be(&self, models: &ModelFilter) -> bool {
        let own = ModelFilter::new(self.names.iter().copied());
        self.names.iter().any(|name| models.matches(&ModelName::new(*name)))
            || models.names().any(|name| own.matches(&ModelName::new(name)))
    }

    /// Which part of the GPU an instance of the profile is.
    pub fn part_of(&self, profile: &Profile) -> GpuPart {
        let slices = ratio(profile.slices(), self.slices()).unwrap_or(Share::WHOLE);
        let slices = slices.min(Share::WHOLE);
        let units = ratio(profile.size.into(), self.axis.into()).unwrap_or(Share::WHOLE);
        GpuPart { slices, slices_and_units: slices.min(units), usable: self.usable() }
    }

    /// Memory of the instance that is the whole GPU.
    pub fn usable(&self) -> MemMib {
        MemMib::new(self.profiles.last().map_or(0, |profile| profile.memory_mib))
    }

    /// The profile of this name, of whatever variant.
    pub fn profile(&self, name: &MigProfile) -> Option<&Profile> {
        let (plain, variant) = name.parts();
        self.profiles.iter().find(|known| known.name == plain && known.has_variant(variant))
    }

    /// How many slices of compute it has: those of the whole GPU, such as 7 of `7g.80gb`.
    pub fn slices(&self) -> u64 {
        self.profiles.last().map_or(1, Profile::slices)
    }

    /// The part of a GPU's compute in MIG mode that an instance of the profile has, rounded down.
    pub fn compute_of(&self, name: &MigProfile) -> Option<Share> {
        let all = self.profiles.last()?.multiprocessors;
        let own = self.profile(name)?.multiprocessors;
        ratio(own.into(), all.into())
    }

    /// Whether the table has an instance of the profile at these units.
    pub(crate) fn has(&self, profile: &MigProfile, slot: Slot) -> bool {
        self.profile(profile)
            .is_some_and(|known| known.size == slot.size && known.starts.contains(&slot.start))
    }

    /// Whether instances of these profiles fit together beside the units that are `taken`; one with a start
    /// begins there.
    fn is_possible(&self, taken: u32, instances: &mut [(&Profile, Option<u32>)]) -> bool {
        instances.sort_by_key(|(profile, start)| {
            (std::cmp::Reverse(start.is_some()), std::cmp::Reverse(profile.size))
        });
        let units: u32 = instances.iter().map(|(profile, _)| profile.size).sum();
        units <= self.axis && has_room(instances, taken)
    }
}

/// A part of a whole that is not memory.
fn ratio(part: u64, whole: u64) -> Option<Share> {
    Share::ratio(MemMib::new(part), MemMib::new(whole))
}

impl Profile {
    /// Whether it has this variant; all have none.
    fn has_variant(&self, variant: &str) -> bool {
        // Resource names have `.` for `+`.
        let after_dot = variant.strip_prefix('.');
        variant.is_empty()
            || self.variants.iter().any(|known| {
                known == variant || after_dot.is_some() && known.strip_prefix('+') == after_dot
            })
    }

    /// How many slices of compute it has, such as 2 of `2g.20gb`.
    pub(crate) fn slices(&self) -> u64 {
        let (slices, _) = self.name.split_once('g').unzip();
        slices.and_then(|slices| slices.parse().ok()).unwrap_or(1)
    }

    /// The units of an instance that begins there, one bit each.
    pub fn units(&self, start: u32) -> u32 {
        Slot { start, size: self.size }.units()
    }

    /// Where an instance can begin beside the units that are `taken`.
    pub(crate) fn free_starts(&self, taken: u32) -> impl Iterator<Item = u32> {
        self.starts.iter().copied().filter(move |start| self.units(*start) & taken == 0)
    }
}

/// Whether all instances fit beside the units that are taken. With eight units there is little to
/// try.
fn has_room(instances: &[(&Profile, Option<u32>)], taken: u32) -> bool {
    let Some(((profile, start), rest)) = instances.split_first() else { return true };
    let mut free = profile.free_starts(taken);
    free.any(|at| {
        start.is_none_or(|start| start == at) && has_room(rest, taken | profile.units(at))
    })
}

/// Why a reported instance cannot be. Nothing is allocated on it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum MigFault {
    /// The model has no such profile.
    #[error("a GPU of model `{model}` has no MIG profile `{profile}`")]
    Profile {
        /// The model.
        model: ModelName,
        /// The profile.
        profile: MigProfile,
    },
    /// A compute instance, a part of a MIG instance.
    #[error("the compute instance of profile `{profile}` shares the memory of a MIG instance")]
    ComputeInstance {
        /// The profile.
        profile: MigProfile,
    },
    /// It begins where its profile does not allow.
    #[error("a MIG instance of profile `{profile}` cannot begin at unit {start}")]
    Start {
        /// The profile.
        profile: MigProfile,
        /// The unit.
        start: u32,
    },
    /// It covers units of another instance.
    #[error("the MIG instance overlaps instance `{other}`")]
    Overlap {
        /// The other one.
        other: DeviceId,
    },
    /// Another instance of the GPU has the media engines, too.
    #[error(
        "another MIG instance of GPU `{parent}` has the media engines, too, and one can have them: destroy one of \
         the two"
    )]
    Media {
        /// The GPU.
        parent: DeviceId,
    },
    /// The instances of the GPU do not fit on it together.
    #[error("the {instances} MIG instances of GPU `{parent}` cannot lie beside each other on it")]
    Crowded {
        /// The GPU.
        parent: DeviceId,
        /// How many instances are reported.
        instances: usize,
    },
}

/// The instances among `devices` that cannot be, as far as their models are listed, and compute
/// instances, which gpupack does not allocate. `details` say where an instance lies, and which NVML lists for
/// its GPU, if known.
pub(crate) fn faults(
    devices: &[Device],
    details: &BTreeMap<DeviceId, DeviceDetails>,
) -> BTreeMap<DeviceId, MigFault> {
    let mut faults = BTreeMap::new();
    for parent in devices.iter().filter(|device| device.kind == DeviceKind::MigParent) {
        match Geometry::of(&parent.model, parent.total) {
            Some(geometry) => faults.extend(faults_on(geometry, parent, devices, details)),
            None => {
                faults.extend(devices.iter().filter_map(|device| compute_instance(device, parent)))
            }
        }
    }
    faults
}

/// The fault of a compute instance (`1c.3g.40gb`): it reports all memory of its MIG instance, and
/// so do its neighbors there.
fn compute_instance(device: &Device, parent: &Device) -> Option<(DeviceId, MigFault)> {
    let DeviceKind::MigInstance { parent: of, profile } = &device.kind else { return None };
    let (slices, _) = profile.as_str().split_once("c.")?;
    let is_one = *of == parent.id && slices.bytes().all(|byte| byte.is_ascii_digit());
    is_one.then(|| (device.id.clone(), MigFault::ComputeInstance { profile: profile.clone() }))
}

/// An instance that its GPU can have.
struct Sound<'a> {
    id: &'a DeviceId,
    /// Its entry of the table; `None` if NVML lists it.
    known: Option<&'a Profile>,
    start: Option<u32>,
    /// Its units; none if it is not known where it begins.
    units: u32,
    has_media: bool,
}

fn faults_on(
    geometry: &Geometry,
    parent: &Device,
    devices: &[Device],
    details: &BTreeMap<DeviceId, DeviceDetails>,
) -> BTreeMap<DeviceId, MigFault> {
    let listed = details.get(&parent.id).map_or(&[][..], |details| &details.mig_profiles);
    let mut faults = BTreeMap::new();
    let mut sound: Vec<Sound<'_>> = Vec::new();
    for device in devices {
        let DeviceKind::MigInstance { parent: of, profile } = &device.kind else { continue };
        if *of != parent.id {
            continue;
        }
        let slot = details.get(&device.id).and_then(|details| details.slot);
        let start = slot.map(|slot| slot.start);
        let at = slot.filter(|slot| listed.iter().any(|known| known.is_at(profile, *slot)));
        let (known, units) = match (at, geometry.profile(profile), start) {
            (Some(slot), ..) => (None, slot.units()),
            (None, None, _) => {
                let (model, profile) = (parent.model.clone(), profile.clone());
                faults.insert(device.id.clone(), MigFault::Profile { model, profile });
                continue;
            }
            (None, Some(known), Some(start)) if !known.starts.contains(&start) => {
                let profile = profile.clone();
                faults.insert(device.id.clone(), MigFault::Start { profile, start });
                continue;
            }
            (None, Some(known), start) => {
                (Some(known), start.map_or(0, |start| known.units(start)))
            }
        };
        let has_media = profile.has_media();
        sound.push(Sound { id: &device.id, known, start, units, has_media });
    }
    for own in &sound {
        let other = sound.iter().find(|other| other.id != own.id && other.units & own.units != 0);
        if let Some(other) = other {
            faults.insert(own.id.clone(), MigFault::Overlap { other: other.id.clone() });
        }
    }
    let with_media = sound.iter().filter(|instance| instance.has_media);
    if with_media.clone().count() > 1 {
        let media = MigFault::Media { parent: parent.id.clone() };
        faults.extend(with_media.map(|instance| (instance.id.clone(), media.clone())));
    }
    sound.retain(|instance| !faults.contains_key(instance.id));
    if !fit_together(geometry, &sound) {
        let instances = sound.len();
        let crowded = MigFault::Crowded { parent: parent.id.clone(), instances };
        faults.extend(sound.iter().map(|instance| (instance.id.clone(), crowded.clone())));
    }
    faults
}

/// Whether these instances, which do not overlap as far as known, can lie beside each other.
fn fit_together(geometry: &Geometry, sound: &[Sound<'_>]) -> bool {
    let listed = sound.iter().filter(|instance| instance.known.is_none());
    let taken = listed.fold(0, |taken, instance| taken | instance.units);
    let places = sound.iter().filter_map(|instance| Some((instance.known?, instance.start)));
    let mut places: Vec<_> = places.collect();
    geometry.is_possible(taken, &mut places)
}

#[cfg(test)]
mod tests;
