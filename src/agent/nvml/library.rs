//! Opens NVIDIA's library, and keeps the handles of its devices.
//!
//! Safety: handles come from the library that `nvml` keeps open, and are only passed back to it, which checks them.

#![expect(unsafe_code, reason = "the wrapper's handles end with a borrow; see above")]

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::nvmlDevice_t;

use crate::gpu::sample::ProbeError;
use crate::nvml::trouble::start_error;

/// The library by default; the loader's search path applies.
pub(crate) const LIBRARY: &str = "libnvidia-ml.so.1";

/// Opens the library. A second time in one process only counts.
///
/// # Errors
/// [`ProbeError`] if it is missing, if the driver is not loaded, or if it is too old.
pub(crate) fn open(library: &Path) -> Result<Nvml, ProbeError> {
    let path: &OsStr = library.as_os_str();
    let nvml = Nvml::builder().lib_path(path).init().map_err(|error| match error {
        NvmlError::LibloadingError(cause) => missing(library, cause.to_string()),
        NvmlError::LibraryNotFound => missing(library, error.to_string()),
        error => start_error("start", &error),
    })?;
    if nvml.lib().nvmlShutdown.is_err() {
        // The wrapper calls it when dropped, and panics if it does not exist.
        std::mem::forget(nvml);
        return Err(ProbeError::DriverTooOld { cause: "nvmlShutdown".to_owned() });
    }
    Ok(nvml)
}

fn missing(library: &Path, cause: String) -> ProbeError {
    ProbeError::LibraryMissing { library: library.to_owned(), cause }
}

/// The handle of a device.
#[derive(Clone, Copy, Debug)]
struct Handle(nvmlDevice_t);

// SAFETY: NVML may be called from any thread, and a handle is only ever passed back to it.
unsafe impl Send for Handle {}

impl Handle {
    fn of(device: &Device<'_>) -> Self {
        Self(unsafe { device.handle() })
    }

    fn device(self, nvml: &Nvml) -> Device<'_> {
        unsafe { Device::new(self.0, nvml) }
    }
}

/// Where a MIG device is: the positions of its GPU, and among the devices of that GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MigPosition {
    pub(crate) gpu: u32,
    pub(crate) device: u32,
}

/// The handles of an open library's devices. On large nodes a lookup takes seconds, so each device is looked up once.
///
/// Handles of GPUs are valid as long as the library is open. Those of MIG devices end with their instance: one that no
/// longer answers has to be forgotten.
#[derive(Debug, Default)]
pub(crate) struct Handles {
    gpus: BTreeMap<u32, KeptGpu>,
    /// The number of GPUs at the last count.
    count: u32,
}

#[derive(Debug)]
struct KeptGpu {
    handle: Handle,
    /// Its UUID, once that is known.
    uuid: Option<String>,
    /// Its MIG devices, by position.
    instances: BTreeMap<u32, Handle>,
    /// Whether all positions were looked at.
    is_walked: bool,
    /// Whether one of them had no device.
    is_vacant: bool,
}

impl Handles {
    /// Learns the number of GPUs. If it has changed, all are looked up again.
    pub(crate) fn expect(&mut self, count: u32) {
        if count != self.count {
            self.gpus.clear();
        }
        self.count = count;
    }

    /// The GPU at a position.
    ///
    /// # Errors
    /// The library's error about the first lookup.
    pub(crate) fn gpu<'a>(
        &mut self,
        nvml: &'a Nvml,
        position: u32,
    ) -> Result<Device<'a>, NvmlError> {
        if let Some(kept) = self.gpus.get(&position) {
            return Ok(kept.handle.device(nvml));
        }
        let gpu = nvml.device_by_index(position)?;
        let (handle, instances) = (Handle::of(&gpu), BTreeMap::new());
        self.gpus.insert(
            position,
            KeptGpu { handle, uuid: None, instances, is_walked: false, is_vacant: false },
        );
        Ok(gpu)
    }

    /// Learns the UUID of the GPU at a position.
    pub(crate) fn name(&mut self, position: u32, uuid: &str) {
        if let Some(kept) = self.gpus.get_mut(&position)
            && kept.uuid.as_deref() != Some(uuid)
        {
            kept.uuid = Some(uuid.to_owned());
        }
    }

    /// The GPU with this UUID, if it is known.
    pub(crate) fn named<'a>(&self, nvml: &'a Nvml, uuid: &str) -> Option<Device<'a>> {
        let mut kept = self.gpus.values();
        let found = kept.find(|kept| kept.uuid.as_deref() == Some(uuid))?;
        Some(found.handle.device(nvml))
    }

    /// Has the GPU at a position looked up again.
    pub(crate) fn forget(&mut self, position: u32) {
        self.gpus.remove(&position);
    }

    /// The MIG device at a position, if it was looked up.
    pub(crate) fn instance<'a>(&self, nvml: &'a Nvml, at: MigPosition) -> Option<Device<'a>> {
        let handle = self.gpus.get(&at.gpu)?.instances.get(&at.device)?;
        Some(handle.device(nvml))
    }

    /// Keeps the handle of a MIG device.
    pub(crate) fn keep(&mut self, at: MigPosition, device: &Device<'_>) {
        if let Some(kept) = self.gpus.get_mut(&at.gpu) {
            kept.instances.insert(at.device, Handle::of(device));
        }
    }

    /// Has the MIG device at a position looked up again.
    pub(crate) fn forget_instance(&mut self, at: MigPosition) {
        if let Some(kept) = self.gpus.get_mut(&at.gpu) {
            kept.instances.remove(&at.device);
        }
    }

    /// Whether the positions of a GPU were looked at since it is in MIG mode.
    pub(crate) fn is_walked(&self, gpu: u32) -> bool {
        self.gpus.get(&gpu).is_some_and(|kept| kept.is_walked)
    }

    /// Notes that all positions of a GPU were looked at, and their number.
    pub(crate) fn walked(&mut self, gpu: u32, positions: u32) {
        if let Some(kept) = self.gpus.get_mut(&gpu) {
            kept.is_walked = true;
            kept.is_vacant = kept.instances.len() < positions as usize;
        }
    }

    /// Whether a GPU in MIG mode has positions without a device.
    pub(crate) fn have_vacancies(&self) -> bool {
        self.gpus.values().any(|kept| kept.is_vacant)
    }

    /// Notes that a GPU is not in MIG mode, so that it has no such devices.
    pub(crate) fn note_whole(&mut self, gpu: u32) {
        if let Some(kept) = self.gpus.get_mut(&gpu) {
            (kept.is_walked, kept.is_vacant) = (false, false);
            kept.instances.clear();
        }
    }
}
