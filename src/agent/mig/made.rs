//! The MIG instances that the agent made since the last boot, and what it has begun.
//!
//! They are in a small file under `/run`: instances do not survive a boot either. An agent that
//! starts again knows its instances by it, and what a crash left half done. It is written in one
//! step before each change of a GPU. If it cannot be written, nothing is made: no later agent would
//! know whose the instance is. A damaged file counts as empty: then the instances count as those of
//! others, and gpupack never removes these on its own.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::mig::plan::{GpuInstance, GpuLayout, Unfinished, Units};
use wire::api::state::{DeviceKind, MigPlacement};
use wire::mutation::{Mutation, mutated};
use wire::report::bodies::{DeviceReport, MigOrders};

/// Name of the file in its folder.
const FILE: &str = "made.json";

/// Longest file that is read, in bytes.
const MAX_FILE_BYTES: u64 = 256 << 10;

/// Most instances in it: four times those of a node of 16 GPUs. The rest counts as others' own.
const MAX_INSTANCES: usize = 448;

/// The content of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct Content {
    /// The boot in which it was written, if it is known.
    boot: Option<String>,
    /// UUIDs of the instances, each with that of its GPU.
    made: BTreeMap<String, String>,
    /// Where they lie, unless an earlier version left that out. The driver derives the UUID from numbers that
    /// the next instance on these units gets, whatever its profile (`nvGenerateSmcUuid` of NVIDIA's kernel modules).
    #[serde(default)]
    places: BTreeMap<String, Place>,
    /// What is not done yet.
    unfinished: Vec<Unfinished>,
}

/// Where an instance lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Place {
    profile: u32,
    slot: Units,
}

impl Place {
    fn of(instance: &GpuInstance) -> Self {
        Self { profile: instance.profile, slot: instance.slot }
    }

    fn is_at(self, place: MigPlacement) -> bool {
        (self.slot.start, self.slot.size) == (place.start, place.size)
    }
}

impl Content {
    /// Notes that the devices of an instance are its own.
    fn own(&mut self, gpu: &GpuLayout, instance: &GpuInstance) {
        for uuid in &instance.devices {
            self.made.insert(uuid.clone(), gpu.uuid.clone());
            self.places.insert(uuid.clone(), Place::of(instance));
        }
    }

    /// Keeps the places of the instances that are made, and no others.
    fn tidy(&mut self) {
        while self.made.len() > MAX_INSTANCES {
            self.made.pop_last();
        }
        self.places.retain(|uuid, _| self.made.contains_key(uuid));
    }

    /// Whether this is the instance that was made under this UUID.
    fn is_made(&self, uuid: &str, there: &GpuInstance) -> bool {
        let is_there = there.devices.iter().any(|device| device == uuid);
        is_there && self.places.get(uuid).is_none_or(|place| *place == Place::of(there))
    }

    /// Instances that are made or begun.
    fn count(&self) -> usize {
        self.made.len() + self.unfinished.len()
    }
}

/// How an instance stands to those that were made here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It was made here, or taken over.
    Made,
    /// It is whole, but was not ready at the last look.
    New,
    /// It is of others, or has no device.
    Other,
}

/// The instances made since the last boot, and the file with them.
#[derive(Debug, Default)]
pub struct MadeInstances {
    folder: PathBuf,
    content: Content,
    /// How often this run of the agent has changed an instance, or noted what became of a change.
    changes: u64,
}

impl MadeInstances {
    /// Reads the file in `folder`, unless it is of another boot than `boot`.
    pub(crate) fn read(folder: &Path, boot: Option<String>) -> Self {
        let path = folder.join(FILE);
        let content = match content(&path) {
            Ok(content) if content.boot == boot => content,
            Ok(_) => Content::default(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Content::default(),
            Err(error) => {
                let file = path.display();
                tracing::warn!(%file, %error, "the list of MIG instances made here cannot be read");
                Content::default()
            }
        };
        let content = Content { boot, ..content };
        Self { folder: folder.to_owned(), content, changes: 0 }
    }

    /// What is not done yet.
    pub fn unfinished(&self) -> &[Unfinished] {
        &self.content.unfinished
    }

    /// Notes that the agent begins to make or to remove an instance.
    ///
    /// # Errors
    /// The file cannot be written; nothing is noted then.
    pub fn begin(&mut self, work: Unfinished) -> io::Result<()> {
        self.changes += 1;
        let mut next = self.content.clone();
        next.unfinished.retain(|known| !known.is_same_place(&work));
        next.unfinished.push(work);
        self.replace(next)
    }

    /// Notes what became of all that was begun on these GPUs, and of the instances made there. What
    /// is on a GPU that is not among them stays as it is noted.
    ///
    /// # Errors
    /// The file cannot be written; it is noted in memory all the same.
    pub fn settle(&mut self, layouts: &[GpuLayout]) -> io::Result<()> {
        let mut next = self.content.clone();
        let mut whole = Vec::new();
        next.unfinished.retain(|work| {
            let Some(gpu) = layouts.iter().find(|layout| layout.uuid == work.gpu) else {
                return true;
            };
            let Some(there) = gpu.instances.iter().find(|instance| work.is(gpu, instance)) else {
                return false;
            };
            if work.is_new {
                whole.push((gpu, there));
            }
            there.devices.is_empty()
        });
        whole.into_iter().for_each(|(gpu, there)| next.own(gpu, there));
        let known = next.clone();
        next.made.retain(|uuid, gpu| {
            let layout = layouts.iter().find(|layout| layout.uuid == *gpu);
            layout.is_none_or(|it| it.instances.iter().any(|there| known.is_made(uuid, there)))
        });
        next.tidy();
        if next == self.content {
            return Ok(());
        }
        self.changes += 1;
        self.content = next.clone();
        self.replace(next)
    }

    /// Takes over what others made on these GPUs, as if it were made here, but the devices `of_kubelet`. What has
    /// no compute instance is to go. Returns how many instances that are.
    ///
    /// # Errors
    /// The file cannot be written; nothing is taken over then.
    pub fn adopt(
        &mut self,
        layouts: &[GpuLayout],
        of_kubelet: &BTreeSet<String>,
    ) -> io::Result<usize> {
        let mut next = self.content.clone();
        let in_mig_mode = layouts.iter().filter(|gpu| gpu.is_in_mig_mode);
        for (gpu, there) in
            in_mig_mode.flat_map(|gpu| gpu.instances.iter().map(move |instance| (gpu, instance)))
        {
            let is_known = |work: &Unfinished| work.is(gpu, there);
            let count = next.count() + there.devices.len();
            match &there.devices[..] {
                _ if count >= MAX_INSTANCES => break,
                all if all.iter().any(|uuid| of_kubelet.contains(uuid)) => {}
                [] if next.unfinished.iter().any(is_known) => {}
                // Its nodes are missing: it counts as made once it has them.
                _ if next.unfinished.iter().any(|work| work.is_new && is_known(work)) => {}
                _ if mutated(Mutation::TakenOverStays) => {}
                [] => next.unfinished.push(gpu.begun(there)),
                _ => next.own(gpu, there),
            }
        }
        let adopted = next.count() - self.content.count();
        if adopted > 0 {
            self.changes += 1;
            self.replace(next)?;
        }
        Ok(adopted)
    }

    /// UUIDs of the GPUs that these orders, and what is not done yet, are about.
    pub fn concerned(&self, orders: &MigOrders) -> BTreeSet<String> {
        let made = orders.make.iter().map(|place| &place.gpu);
        let removed = orders.remove.iter().filter_map(|uuid| self.content.made.get(uuid));
        let unfinished = self.content.unfinished.iter().map(|work| &work.gpu);
        made.chain(removed).chain(unfinished).cloned().collect()
    }

    /// How an instance stands to those that were made here.
    pub fn standing(&self, gpu: &GpuLayout, instance: &GpuInstance) -> Standing {
        let is_begun = |work: &Unfinished| work.is_new && work.is(gpu, instance);
        let mut made = self.content.made.keys();
        if made.any(|uuid| self.content.is_made(uuid, instance)) {
            Standing::Made
        } else if !instance.devices.is_empty() && self.content.unfinished.iter().any(is_begun) {
            Standing::New
        } else {
            Standing::Other
        }
    }

    /// How many instances were made here, as far as it is known.
    pub fn count(&self) -> usize {
        self.content.made.len()
    }

    /// The orders of which none is about an instance that was not made here.
    pub fn own(&self, orders: &MigOrders) -> MigOrders {
        let own = orders.remove.iter().filter(|uuid| self.content.made.contains_key(*uuid));
        MigOrders { remove: own.cloned().collect(), ..orders.clone() }
    }

    /// Notes that the driver refused what was begun. A whole instance at that place is then of others.
    pub fn refused(&mut self, work: &Unfinished, layout: &GpuLayout) {
        let there = layout.instances.iter().find(|instance| work.is(layout, instance));
        if there.is_some_and(|instance| !instance.devices.is_empty())
            && let Err(error) = self.disown(work)
        {
            tracing::warn!(%error, "the list of MIG instances made here cannot be written");
        }
    }

    /// Notes that what lies where the agent has begun a change is of others, whole or not.
    ///
    /// # Errors
    /// The file cannot be written; it is noted in memory all the same.
    pub fn disown(&mut self, work: &Unfinished) -> io::Result<()> {
        self.changes += 1;
        self.content.unfinished.retain(|known| !known.is_same_place(work));
        self.replace(self.content.clone())
    }

    /// How often instances were changed so far: it tells a list read before a change from one read after it.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Forgets the instances that an inventory lacks though it has their GPU: a later one may get
    /// the same UUID. `changes` is [`MadeInstances::changes`] from before the inventory was read: one that
    /// was read during a change may lack instances that are there.
    pub(crate) fn forget_absent(&mut self, inventory: &[DeviceReport], changes: u64) {
        if changes != self.changes || !self.content.unfinished.is_empty() {
            return;
        }
        let has = |uuid: &String| inventory.iter().any(|device| device.uuid == *uuid);
        let is_kept = |uuid: &String, gpu: &String| {
            !has(gpu) || inventory.iter().any(|it| it.uuid == *uuid && self.lies_as_made(it))
        };
        if self.content.made.iter().all(|(uuid, gpu)| is_kept(uuid, gpu)) {
            return;
        }
        let mut next = self.content.clone();
        next.made.retain(|uuid, gpu| is_kept(uuid, gpu));
        next.tidy();
        self.content = next.clone();
        if let Err(error) = self.replace(next) {
            tracing::warn!(%error, "the list of MIG instances made here cannot be written");
        }
    }

    /// Whether the agent made this instance since the last boot, or is making it.
    pub fn has_made(&self, device: &DeviceReport) -> bool {
        self.is_noted(device) || self.is_making(device)
    }

    /// Whether the agent is making this instance: it is not ready before it is noted as made.
    pub fn is_making(&self, device: &DeviceReport) -> bool {
        let (DeviceKind::MigInstance, Some(gpu)) = (device.kind, &device.parent) else {
            return false;
        };
        let is_it = |work: &Unfinished| {
            let slot = device.mig_placement;
            let is_there = slot.is_some_and(|place| {
                place.start == work.slot.start && place.size == work.slot.size
            });
            work.is_new && work.gpu == *gpu && is_there
        };
        !self.is_noted(device) && self.content.unfinished.iter().any(is_it)
    }

    /// Whether a device is noted as made, and does not lie elsewhere than the one that was made under its UUID.
    fn is_noted(&self, device: &DeviceReport) -> bool {
        self.content.made.contains_key(&device.uuid) && self.lies_as_made(device)
    }

    /// Whether a device does not lie elsewhere than the one that was made under its UUID.
    fn lies_as_made(&self, device: &DeviceReport) -> bool {
        let place = self.content.places.get(&device.uuid).zip(device.mig_placement);
        place.is_none_or(|(made, now)| made.is_at(now))
    }

    /// Writes the file in one step.
    fn replace(&mut self, next: Content) -> io::Result<()> {
        std::fs::create_dir_all(&self.folder)?;
        let (path, new) = (self.folder.join(FILE), self.folder.join("made.json.new"));
        std::fs::write(&new, serde_json::to_vec(&next)?)?;
        std::fs::rename(new, path)?;
        self.content = next;
        Ok(())
    }
}

impl Unfinished {
    fn is_same_place(&self, other: &Self) -> bool {
        self.gpu == other.gpu && self.slot == other.slot
    }
}

fn content(path: &Path) -> io::Result<Content> {
    let mut text = Vec::new();
    File::open(path)?.take(MAX_FILE_BYTES).read_to_end(&mut text)?;
    let content: Content = serde_json::from_slice(&text)?;
    let lengths = [content.made.len(), content.places.len(), content.unfinished.len()];
    let is_sane = lengths.iter().all(|length| *length <= MAX_INSTANCES);
    is_sane.then_some(content).ok_or_else(|| io::Error::other("it lists too many instances"))
}

#[cfg(test)]
mod tests;
