//! What this container has of the GPUs of its node, by NVML alone: for `gpupack doctor --probe`. Nothing is changed.

use std::path::{Path, PathBuf};

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use crate::nvml::library::{self, LIBRARY};
use crate::upkeep::condition::is_module_loaded;
use runtime::causes::with_causes;
use wire::api::commands::{SeenDevice, SeenDevices};
use wire::api::state::DeviceKind;
use wire::ids::MAX_DEVICES_PER_NODE;

/// Most MIG instances of one GPU that are looked at.
const INSTANCES_MAX: u32 = 32;

/// Most devices that are listed, and characters of texts: kubelet keeps 4,096 bytes of what a container leaves.
const LISTED_MAX: usize = 16;
const TEXT_MAX: usize = 512;

/// Flags of `gpupack-agent devices`.
#[derive(Clone, Debug, clap::Args)]
pub struct SeenArgs {
    /// NVIDIA's library, if the loader does not find it.
    #[arg(long, value_name = "PATH")]
    pub nvml_library: Option<PathBuf>,

    /// Mount point of the process table.
    #[arg(long, value_name = "PATH", default_value = "/proc")]
    pub proc_root: PathBuf,

    /// Write it to this file too.
    #[arg(long, value_name = "FILE")]
    pub to: Option<PathBuf>,

    /// Seconds to go on before the end, so that the agent of the node sees this container.
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=60))]
    pub stay: u64,

    /// What NVIDIA's runtime left of the variable.
    #[arg(long, env = "NVIDIA_VISIBLE_DEVICES", default_value = "", hide = true)]
    pub visible_devices: String,
}

/// What is seen here, in one line.
pub fn seen_as_json(args: &SeenArgs) -> String {
    serde_json::to_string(&seen(args)).expect("it is plain data")
}

fn seen(args: &SeenArgs) -> SeenDevices {
    let mut seen = SeenDevices {
        module_loaded: is_module_loaded(&args.proc_root),
        visible_devices: cut(&args.visible_devices),
        ..SeenDevices::default()
    };
    let library = args.nvml_library.as_deref().unwrap_or_else(|| Path::new(LIBRARY));
    match library::open(library) {
        Ok(nvml) => {
            if let Err(error) = list(&nvml, &mut seen.items) {
                seen.error = Some(cut(&with_causes(&error)));
            }
        }
        Err(error) => seen.error = Some(cut(&with_causes(&error))),
    }
    seen.left_out = seen.items.len().saturating_sub(LISTED_MAX);
    seen.items.truncate(LISTED_MAX);
    seen
}

fn cut(text: &str) -> String {
    text.chars().take(TEXT_MAX).collect()
}

fn list(nvml: &Nvml, items: &mut Vec<SeenDevice>) -> Result<(), NvmlError> {
    for index in 0..nvml.device_count()? {
        let gpu = nvml.device_by_index(index)?;
        let instances = instances(&gpu)?;
        let kind = match instances.is_empty() {
            true => DeviceKind::Gpu,
            false => DeviceKind::MigParent,
        };
        items.push(device(&gpu, kind)?);
        for instance in instances {
            items.push(device(&instance, DeviceKind::MigInstance)?);
        }
        if items.len() >= MAX_DEVICES_PER_NODE {
            break;
        }
    }
    Ok(())
}

fn instances<'a>(gpu: &'a Device<'_>) -> Result<Vec<Device<'a>>, NvmlError> {
    let most = match gpu.mig_device_count() {
        Ok(most) => most.min(INSTANCES_MAX),
        Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_)) => 0,
        Err(error) => return Err(error),
    };
    let mut instances = Vec::new();
    for index in 0..most {
        match gpu.mig_device_by_index(index) {
            Ok(instance) => instances.push(instance),
            Err(NvmlError::NotFound | NvmlError::InvalidArg | NvmlError::NotSupported) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(instances)
}

fn device(device: &Device<'_>, device_kind: DeviceKind) -> Result<SeenDevice, NvmlError> {
    let memory = match device.memory_info() {
        Ok(memory) => memory.total >> 20,
        // A parent does not let every client read it, and GPUs with unified memory have none.
        Err(NvmlError::NotSupported | NvmlError::NoPermission) => 0,
        Err(error) => return Err(error),
    };
    Ok(SeenDevice { uuid: device.uuid()?, device_kind, memory_mib: memory })
}
