//! The hardware that is played: the scenario file, read again when it has changed.

use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use serde::Deserialize;

use super::{instances, kernel, rights};

/// A node as NVML would report it.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Scenario {
    /// Version of the driver; bytes that are no text are written `\u00ff`.
    pub driver: Option<String>,
    /// Version of CUDA that the driver brings, as NVML counts: 13000 for 13.0.
    pub cuda: Option<i32>,
    /// Return codes of calls without a device, by symbol.
    #[serde(default)]
    pub failures: BTreeMap<String, c_uint>,
    /// Milliseconds that a call takes, by symbol.
    #[serde(default)]
    pub delays_ms: BTreeMap<String, u64>,
    /// The number of GPUs that is reported, if it is false.
    pub count: Option<c_uint>,
    /// The GPUs, in the order of NVML's index.
    #[serde(default)]
    pub gpus: Vec<Gpu>,
    /// Everything that has happened since the start; tests add to its end.
    #[serde(default)]
    pub events: Vec<Event>,
    /// Whether each call is written to the file `journal` beside the scenario.
    #[serde(default)]
    pub journal: bool,
    /// Whether callers lack the rights to monitor and to configure MIG; see `rights`.
    #[serde(default)]
    pub unprivileged: bool,
    /// The folder in which the kernel's files about MIG are shown; see `kernel`.
    pub proc_root: Option<PathBuf>,
    /// Number of the boot; MIG instances that were made are gone after another one.
    #[serde(default)]
    pub boot: u64,
    /// Number of the loaded driver. A process that called the library before it was another one gets
    /// [`Scenario::stale_code`] for ever; the next process is well.
    #[serde(default)]
    pub load: u64,
    /// What a process gets that has the library, or the rights, of another driver.
    #[serde(default = "stale_code")]
    pub stale_code: c_uint,
}

/// Library and kernel module are of different versions.
fn stale_code() -> c_uint {
    18
}

/// The driver that was loaded when this process first called the library.
static LOAD: OnceLock<u64> = OnceLock::new();

/// The same, and notes it for the time when this process has loaded the library again: that helps no process.
fn first_load(now: u64) -> u64 {
    let file = format!("load-{}", std::process::id());
    match lines_of(&file).trim().parse() {
        Ok(load) => load,
        Err(_) => {
            write_line_to(&file, &now.to_string());
            now
        }
    }
}

impl Scenario {
    /// The answer to every call of a process that another driver was loaded under.
    pub(crate) fn staleness(&self) -> Option<c_uint> {
        (*LOAD.get_or_init(|| first_load(self.load)) != self.load).then_some(self.stale_code)
    }
}

/// One GPU or MIG instance.
#[derive(Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Gpu {
    pub uuid: String,
    pub name: String,
    pub total_mib: u64,
    #[serde(default)]
    pub reserved_mib: u64,
    #[serde(default)]
    pub used_mib: u64,
    /// Added to each of the three amounts, for what is no whole number of MiB.
    #[serde(default)]
    pub odd_bytes: u64,
    #[serde(default)]
    pub busy_percent: c_uint,
    #[serde(default)]
    pub processes: Vec<Process>,
    /// Return codes by symbol; `*` stands for all of them.
    #[serde(default)]
    pub failures: BTreeMap<String, c_uint>,
    /// The position from `nvmlDeviceGetIndex`, if it is not the position in the list.
    pub index: Option<c_uint>,
    pub minor: Option<c_uint>,
    /// The bus of its PCI address; domain and device are zero.
    pub bus: Option<c_uint>,
    pub numa_node: Option<u32>,
    /// How it addresses the memory of its host, as NVML counts: 1 HMM, 2 ATS. `None`: the platform
    /// has no such thing.
    pub addressing_mode: Option<c_uint>,
    /// NVLinks, by their number.
    #[serde(default)]
    pub links: Vec<Link>,
    /// Memory limits in MiB by control group; none: the driver has no limits here.
    pub memory_limits: Option<BTreeMap<String, u64>>,
    /// What control groups use by the driver's count, in MiB.
    #[serde(default)]
    pub limited_use: BTreeMap<String, u64>,
    /// The value of field 230; `None`: the driver does not have the field.
    pub recovery_action: Option<u64>,
    /// Kinds of events that it supports, as NVML's bits; `None`: all.
    pub event_types: Option<u64>,
    /// MIG instances, by their position; a GPU that has the list is in MIG mode, `null` is a gap.
    pub mig: Option<Vec<Option<Gpu>>>,
    /// Largest number of MIG instances that is reported, if it is false.
    pub mig_count: Option<c_uint>,
    /// Of a MIG instance: id of its GPU instance, start and size on the axis.
    pub slot: Option<(c_uint, c_uint, c_uint)>,
    /// Of a MIG instance: the number of its compute instance.
    #[serde(default)]
    pub compute: c_uint,
    /// Of a MIG instance: its streaming multiprocessors.
    pub sms: Option<c_uint>,
    /// The model of `profiles.json` whose instances can be made, when `mig` is an empty list.
    pub mig_model: Option<String>,
    /// Instances that are there after a boot: profile and start.
    #[serde(default)]
    pub at_boot: Vec<(String, c_uint)>,
    /// Processes on instances that were made, by the start of the instance.
    #[serde(default)]
    pub mig_processes: BTreeMap<c_uint, Vec<Process>>,
    /// Starts of the instances that a monitor holds open: they cannot be removed, and no list has its process.
    #[serde(default)]
    pub monitored: Vec<c_uint>,
    /// How long a switch of its MIG mode takes that began when the scenario was written; see `busy`.
    #[serde(default)]
    pub switch_ms: u64,
    /// The MIG mode after the next reset, if it is another one.
    pub mig_pending: Option<bool>,
    /// Whether the caller lacks rights, and whether it has GPU instances, seen or not.
    #[serde(skip)]
    pub is_refused: bool,
    #[serde(skip)]
    pub is_divided: bool,
}

/// One process on a device.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Process {
    pub pid: c_uint,
    /// None: the driver cannot say.
    pub used_mib: Option<u64>,
    /// The lists that have it: `compute`, `mps`, `graphics`.
    pub lists: Vec<String>,
    /// Samples of its utilization, as time in microseconds and percent.
    #[serde(default)]
    pub samples: Vec<(u64, c_uint)>,
}

/// One NVLink.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Link {
    /// It leads to the GPU on this bus.
    Gpu(c_uint),
    /// It leads to the switch on this bus.
    Switch(c_uint),
    /// It leads nowhere.
    Down,
}

/// Something that NVML reports by event.
#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Event {
    /// Position of the GPU; one that does not exist: an unknown handle.
    pub gpu: usize,
    /// NVML's bit for the kind of event.
    pub kind: u64,
    /// What belongs to it: the number of an Xid.
    #[serde(default)]
    pub data: u64,
    /// The GPU instance that it is about.
    pub instance: Option<c_uint>,
    /// False: sent also to sets that did not request this kind.
    #[serde(default)]
    pub unasked: bool,
    /// Whether it comes with a handle of the GPU that no call has returned.
    #[serde(default)]
    pub by_new_handle: bool,
}

/// Inode, length and time of change of a file.
type Stamp = (u64, u64, i64, i64);

/// The scenario as it was last read, and the files that it was read from.
struct Stage {
    /// Of the scenario, and of the instances that were made.
    stamp: Option<(Stamp, Option<Stamp>)>,
    scenario: Option<Arc<Scenario>>,
}

static STAGE: Mutex<Stage> = Mutex::new(Stage { stamp: None, scenario: None });

fn stage() -> MutexGuard<'static, Stage> {
    STAGE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The file that holds the scenario.
pub(crate) fn path() -> Option<&'static PathBuf> {
    static PATH: OnceLock<Option<PathBuf>> = OnceLock::new();
    PATH.get_or_init(find_path).as_ref()
}

fn find_path() -> Option<PathBuf> {
    #[expect(clippy::disallowed_methods, reason = "no flag reaches a library")]
    if let Ok(path) = std::env::var("FAKE_NVML_SCENARIO") {
        return Some(path.into());
    }
    // The mapping that contains this code names the file it came from.
    let here = find_path as *const () as usize;
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| {
        let range = line.split_whitespace().next().and_then(|range| range.split_once('-'));
        range.is_some_and(|(start, end)| {
            let number = |text| usize::from_str_radix(text, 16).unwrap_or(0);
            (number(start)..number(end)).contains(&here)
        })
    })?;
    let library = PathBuf::from(&line[line.find('/')?..]);
    let beside = library.with_file_name("scenario.json");
    if beside.is_file() {
        return Some(beside);
    }
    // In a container the runtime has mounted the libraries of the driver alone.
    let version = library.file_name()?.to_str()?.split_once(".so.")?.1;
    let mounted = library.with_file_name(format!("{MOUNTED}.so.{version}"));
    Some(if mounted.is_file() { mounted } else { beside })
}

/// The beginning of the name of a scenario that a container runtime takes for a library of the driver.
const MOUNTED: &str = "libscenario";

/// Leaves out the GPUs whose device nodes a container does not have, as the driver does.
fn only_accessible(path: &Path, scenario: &mut Scenario) {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if name.starts_with(MOUNTED) {
        let is_there = |minor: u32| Path::new(&format!("/dev/nvidia{minor}")).exists();
        scenario.gpus.retain(|gpu| gpu.minor.is_none_or(is_there));
    }
}

/// The current scenario; `None` if the file is missing or is not a scenario.
pub(crate) fn current() -> Option<Arc<Scenario>> {
    let path = path()?;
    let stamp_of = |path: &Path| {
        let file = std::fs::metadata(path).ok()?;
        Some((file.ino(), file.len(), file.mtime(), file.mtime_nsec()))
    };
    let mut stage = stage();
    let stamp = (stamp_of(path)?, stamp_of(&path.with_file_name(instances::FILE)));
    if stage.stamp != Some(stamp) {
        let text = std::fs::read_to_string(path).ok()?;
        let mut scenario = serde_json::from_str(&text);
        match &mut scenario {
            Err(error) => write_line(&format!("no scenario: {error}")),
            Ok(scenario) => {
                only_accessible(path, scenario);
                let made = instances::read(scenario);
                if let Some(made) = &made {
                    instances::add_devices(scenario, made);
                }
                kernel::show(scenario, made.as_ref());
                rights::apply(scenario, made.as_ref());
            }
        }
        *stage = Stage { stamp: Some(stamp), scenario: scenario.ok().map(Arc::new) };
    }
    stage.scenario.clone()
}

/// Adds a line to the journal.
pub(crate) fn write_line(line: &str) {
    write_line_to("journal", line);
}

/// Adds a line to a file beside the scenario.
pub(crate) fn write_line_to(file: &str, line: &str) {
    let Some(path) = path() else { return };
    let file = path.with_file_name(file);
    let file = std::fs::OpenOptions::new().create(true).append(true).open(file);
    if let Ok(mut file) = file {
        // One write, so that lines of several threads stay whole. A full disk costs the line.
        let _ = file.write_all(format!("{line}\n").as_bytes());
    }
}

/// The content of a file beside the scenario; empty if there is none.
pub(crate) fn lines_of(file: &str) -> String {
    let text = path().map(|path| std::fs::read_to_string(path.with_file_name(file)));
    text.and_then(Result::ok).unwrap_or_default()
}
