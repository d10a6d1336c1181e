//! NVML's calls for MIG instances, which `nvml-wrapper` lacks: it has no creation and no removal, and
//! its list of placements is always empty (0.13.0). Each function is safe to call.
//!
//! Safety, for all: symbols come from the open library that `nvml` keeps loaded, with the types of
//! NVIDIA's header; handles come from the same library and are only passed back to it, which checks
//! them; every pointer leads to a local that outlives the call and has the size that the call gets.
//! A buffer of handles has room for as many as the driver says that there can be, and more.

#![expect(unsafe_code, reason = "the C functions of NVML; see above")]

use std::ffi::c_char;
use std::mem;

use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::{
    NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, nvmlComputeInstance_t, nvmlGpuInstance_t,
    nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_v2_t,
};

use crate::mig::plan::Units;
use crate::nvml::raw::symbol;

/// Positions of NVML's lists of profiles that are tried. The header of July 2026 has 18 for GPU instances and 9 for
/// compute instances, more than the binding knows; a driver refuses those that it does not have.
pub(crate) const PROFILE_NUMBERS: u32 = 32;

/// Room for handles of instances: more than any GPU has of one profile.
const HANDLES: usize = 64;

/// Room for placements of a profile.
const PLACEMENTS: usize = 64;

/// A profile of GPU instances as NVML describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProfileInfo {
    /// The number that other calls take.
    pub(crate) id: u32,
    /// Its name, without the word `MIG` before it.
    pub(crate) name: String,
    /// Most instances of it on one GPU.
    pub(crate) most: u32,
    /// Streaming multiprocessors of an instance.
    pub(crate) multiprocessors: u32,
    /// Memory of an instance in MiB.
    pub(crate) memory_mib: u64,
}

/// The GPU instance behind a handle. It must not be used after the instance was destroyed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InstanceHandle(nvmlGpuInstance_t);

/// The compute instance behind a handle, likewise.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ComputeHandle(nvmlComputeInstance_t);

/// A GPU instance.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InstanceInfo {
    /// The driver's number for it, unique on its GPU.
    pub(crate) id: u32,
    pub(crate) profile: u32,
    /// The units that it covers.
    pub(crate) slot: Units,
}

/// The profile with the position `number` in NVML's own list, below [`PROFILE_NUMBERS`].
///
/// # Errors
/// `NotSupported` or `InvalidArg` if this GPU has no such profile.
pub(crate) fn profile(
    nvml: &Nvml,
    gpu: &Device<'_>,
    number: u32,
) -> Result<ProfileInfo, NvmlError> {
    let read = symbol(&nvml.lib().nvmlDeviceGetGpuInstanceProfileInfoV)?;
    let size = u32::try_from(size_of::<nvmlGpuInstanceProfileInfo_v2_t>());
    let info = unsafe {
        let mut info: nvmlGpuInstanceProfileInfo_v2_t = mem::zeroed();
        info.version = size.unwrap_or(0) | 2 << 24;
        nvml_try(read(gpu.handle(), number, &raw mut info))?;
        info
    };
    let name = text(&info.name);
    Ok(ProfileInfo {
        id: info.id,
        name: name.strip_prefix("MIG ").unwrap_or(&name).to_owned(),
        most: info.instanceCount,
        multiprocessors: info.multiprocessorCount,
        memory_mib: info.memorySizeMB,
    })
}

/// The text in a buffer, up to its first zero. On some machines C's letters have a sign, on others none.
fn text(buffer: &[c_char]) -> String {
    let bytes = buffer.iter().flat_map(|letter| letter.to_ne_bytes()).take_while(|byte| *byte != 0);
    String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned()
}

/// Where instances of a profile may lie on a GPU.
pub(crate) fn placements(
    nvml: &Nvml,
    gpu: &Device<'_>,
    profile: u32,
) -> Result<Vec<Units>, NvmlError> {
    let read = symbol(&nvml.lib().nvmlDeviceGetGpuInstancePossiblePlacements_v2)?;
    let mut count = 0;
    nvml_try(unsafe { read(gpu.handle(), profile, std::ptr::null_mut(), &raw mut count) })?;
    let room = usize::try_from(count).unwrap_or(usize::MAX);
    if room > PLACEMENTS {
        return Err(NvmlError::InsufficientSize(Some(room)));
    }
    let mut all = vec![nvmlGpuInstancePlacement_t { start: 0, size: 0 }; PLACEMENTS];
    nvml_try(unsafe { read(gpu.handle(), profile, all.as_mut_ptr(), &raw mut count) })?;
    all.truncate(usize::try_from(count).unwrap_or(usize::MAX));
    Ok(all.into_iter().map(|place| Units { start: place.start, size: place.size }).collect())
}

/// The GPU instances of a profile, of which there are at most `most`.
pub(crate) fn instances(
    nvml: &Nvml,
    gpu: &Device<'_>,
    profile: u32,
    most: u32,
) -> Result<Vec<InstanceInfo>, NvmlError> {
    let lib = nvml.lib();
    let list = symbol(&lib.nvmlDeviceGetGpuInstances)?;
    fits(most)?;
    let mut handles: Vec<nvmlGpuInstance_t> = vec![std::ptr::null_mut(); HANDLES];
    let mut count = most;
    nvml_try(unsafe { list(gpu.handle(), profile, handles.as_mut_ptr(), &raw mut count) })?;
    handles.truncate(usize::try_from(count).unwrap_or(usize::MAX));
    handles.into_iter().map(|handle| info(nvml, InstanceHandle(handle))).collect()
}

/// What the driver says of a GPU instance.
pub(crate) fn info(nvml: &Nvml, instance: InstanceHandle) -> Result<InstanceInfo, NvmlError> {
    let read = symbol(&nvml.lib().nvmlGpuInstanceGetInfo)?;
    let info = unsafe {
        let mut info = mem::zeroed();
        nvml_try(read(instance.0, &raw mut info))?;
        info
    };
    let slot = Units { start: info.placement.start, size: info.placement.size };
    Ok(InstanceInfo { id: info.id, profile: info.profileId, slot })
}

/// Checks that a list of `most` handles fits into a buffer.
fn fits(most: u32) -> Result<(), NvmlError> {
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    if most <= HANDLES { Ok(()) } else { Err(NvmlError::InsufficientSize(Some(most))) }
}

/// The GPU instance of this number.
pub(crate) fn instance(
    nvml: &Nvml,
    gpu: &Device<'_>,
    id: u32,
) -> Result<InstanceHandle, NvmlError> {
    let find = symbol(&nvml.lib().nvmlDeviceGetGpuInstanceById)?;
    let mut handle = std::ptr::null_mut();
    nvml_try(unsafe { find(gpu.handle(), id, &raw mut handle) })?;
    Ok(InstanceHandle(handle))
}

/// Makes a GPU instance of a profile at exactly these units. It has no compute instance yet.
pub(crate) fn create(
    nvml: &Nvml,
    gpu: &Device<'_>,
    profile: u32,
    slot: Units,
) -> Result<InstanceHandle, NvmlError> {
    let create = symbol(&nvml.lib().nvmlDeviceCreateGpuInstanceWithPlacement)?;
    let place = nvmlGpuInstancePlacement_t { start: slot.start, size: slot.size };
    let mut handle = std::ptr::null_mut();
    nvml_try(unsafe { create(gpu.handle(), profile, &raw const place, &raw mut handle) })?;
    Ok(InstanceHandle(handle))
}

/// Destroys a GPU instance without compute instances.
pub(crate) fn destroy(nvml: &Nvml, instance: InstanceHandle) -> Result<(), NvmlError> {
    let destroy = symbol(&nvml.lib().nvmlGpuInstanceDestroy)?;
    nvml_try(unsafe { destroy(instance.0) })
}

/// Profiles of compute instances on a GPU instance: the number of each, its multiprocessors, and how
/// many of it there can be.
fn compute_profiles(
    nvml: &Nvml,
    instance: InstanceHandle,
) -> Result<Vec<(u32, u32, u32)>, NvmlError> {
    let read = symbol(&nvml.lib().nvmlGpuInstanceGetComputeInstanceProfileInfo)?;
    let mut all = Vec::new();
    for number in 0..PROFILE_NUMBERS {
        let engines = NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED;
        let answer = unsafe {
            let mut info = mem::zeroed();
            nvml_try(read(instance.0, number, engines, &raw mut info)).map(|()| info)
        };
        match answer {
            Ok(info) => all.push((info.id, info.multiprocessorCount, info.instanceCount)),
            Err(NvmlError::NotSupported | NvmlError::InvalidArg | NvmlError::NotFound) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(all)
}

/// Makes the compute instance that has all multiprocessors of a GPU instance.
pub(crate) fn create_compute(nvml: &Nvml, instance: InstanceHandle) -> Result<(), NvmlError> {
    let create = symbol(&nvml.lib().nvmlGpuInstanceCreateComputeInstance)?;
    let profiles = compute_profiles(nvml, instance)?;
    // Of several that span it the first one: the others only differ in their media engines.
    let most = profiles.iter().map(|(_, multiprocessors, _)| *multiprocessors).max();
    let spanning = profiles.iter().find(|(_, multiprocessors, _)| Some(*multiprocessors) == most);
    let (profile, ..) = spanning.ok_or(NvmlError::NotSupported)?;
    let mut handle = std::ptr::null_mut();
    nvml_try(unsafe { create(instance.0, *profile, &raw mut handle) })
}

/// The compute instances of a GPU instance.
pub(crate) fn computes(
    nvml: &Nvml,
    instance: InstanceHandle,
) -> Result<Vec<ComputeHandle>, NvmlError> {
    let list = symbol(&nvml.lib().nvmlGpuInstanceGetComputeInstances)?;
    let mut all = Vec::new();
    for (profile, _, most) in compute_profiles(nvml, instance)? {
        fits(most)?;
        let mut handles: Vec<nvmlComputeInstance_t> = vec![std::ptr::null_mut(); HANDLES];
        let mut count = most;
        nvml_try(unsafe { list(instance.0, profile, handles.as_mut_ptr(), &raw mut count) })?;
        handles.truncate(usize::try_from(count).unwrap_or(usize::MAX));
        all.extend(handles.into_iter().map(ComputeHandle));
    }
    Ok(all)
}

/// Destroys a compute instance that no process uses.
pub(crate) fn destroy_compute(nvml: &Nvml, compute: ComputeHandle) -> Result<(), NvmlError> {
    let destroy = symbol(&nvml.lib().nvmlComputeInstanceDestroy)?;
    nvml_try(unsafe { destroy(compute.0) })
}
