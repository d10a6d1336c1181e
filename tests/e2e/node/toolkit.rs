//! NVIDIA's container toolkit, installed and configured as the GPU Operator does: its runtime is started by the
//! operator's wrapper, which starts plain runc while the driver's module is not loaded.
//!
//! `GPUPACK_TOOLKIT` names another of [`RELEASES`] than the first; all scenarios with NVIDIA's runtime then
//! use it.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::cage::Cage;
use super::driver::Driver;
use super::programs::{Programs, said_by};
use crate::clock;

/// A release of the toolkit that a GPU Operator has shipped.
#[derive(Debug)]
pub(crate) struct Release {
    /// Without the `v`.
    pub(crate) version: &'static str,
    /// The first GPU Operator with it, or its line.
    pub(crate) operator: &'static str,
    /// All that it has, except the old one and Tegra's; the operator's own is the first.
    pub(crate) modes: &'static [Mode],
    /// What it reads that others do not.
    reads: &'static [Read],
    /// How the operator's wrapper tells it where its configuration is.
    config: Config,
    /// Where the wrapper says that the module is missing: standard output, or another.
    says: &'static str,
}

/// The hook of the old mode.
const OLD_HOOK: &str = "nvidia-container-runtime-hook";

/// What a release may read of a container or of its own configuration.
#[derive(Debug, PartialEq, Eq)]
enum Read {
    /// The variables of memory limits.
    MemoryLimits,
    /// `swarm-resource`.
    SwarmResource,
}

/// How a wrapper names the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Config {
    /// By the folder above it, and `runc` by the path of programs.
    Folder,
    /// By its path.
    File,
}

/// How the runtime turns names of devices into devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The GPU Operator's from 25.10 on: bare names are of the kind `management.nvidia.com/gpu`.
    Cdi,
    /// The default of the packages, and of older operators.
    Auto,
    /// Specifications made when a container is created.
    JitCdi,
}

impl Mode {
    /// As the configuration has it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cdi => "cdi",
            Self::Auto => "auto",
            Self::JitCdi => "jit-cdi",
        }
    }
}

/// The first is used unless `GPUPACK_TOOLKIT` names another. `docs/platforms.md` has the same ones.
static RELEASES: [Release; 4] = [
    Release {
        version: "1.20.1",
        operator: "26.7.1",
        modes: &[Mode::Cdi, Mode::Auto, Mode::JitCdi],
        reads: &[Read::MemoryLimits, Read::SwarmResource],
        config: Config::File,
        says: " >&2",
    },
    Release {
        version: "1.19.1",
        operator: "26.3.2",
        modes: &[Mode::Cdi, Mode::Auto, Mode::JitCdi],
        reads: &[Read::SwarmResource],
        config: Config::File,
        says: " >&2",
    },
    Release {
        version: "1.18.0",
        operator: "25.10.0",
        modes: &[Mode::Cdi, Mode::Auto, Mode::JitCdi],
        reads: &[],
        config: Config::File,
        says: "",
    },
    Release {
        version: "1.17.8",
        operator: "25.3.1",
        modes: &[Mode::Auto, Mode::Cdi],
        reads: &[],
        config: Config::Folder,
        says: "",
    },
];

impl Release {
    /// The one to test with.
    pub(crate) fn wanted() -> &'static Self {
        let Some(wanted) = clock::variable("GPUPACK_TOOLKIT") else { return &RELEASES[0] };
        let found = RELEASES.iter().find(|release| release.version == wanted);
        let known = RELEASES.each_ref().map(|release| release.version);
        found.unwrap_or_else(|| panic!("GPUPACK_TOOLKIT must be one of {known:?}, not `{wanted}`"))
    }

    /// The programs that take part in the start of a container. The old mode has a hook in each of them, also in those
    /// that get nothing.
    pub(crate) fn programs(&self) -> &'static [&'static str] {
        let all = &["nvidia-container-runtime", "nvidia-cdi-hook", "nvidia-ctk", OLD_HOOK];
        if self.modes.iter().any(|mode| self.is_legacy(*mode)) { all } else { &all[..3] }
    }

    /// Whether names without a kind go to `libnvidia-container` in this mode, which is not built here.
    pub(crate) fn is_legacy(&self, mode: Mode) -> bool {
        mode == Mode::Auto && self.config == Config::Folder
    }

    /// Whether the variables of memory limits do anything.
    pub(crate) fn limits_memory(&self) -> bool {
        self.reads.contains(&Read::MemoryLimits)
    }

    /// Whether a variable that `swarm-resource` names comes before `NVIDIA_VISIBLE_DEVICES`.
    pub(crate) fn reads_swarm_resource(&self) -> bool {
        self.reads.contains(&Read::SwarmResource)
    }

    /// The operator's wrapper of the runtime, as the installer of this release writes it. Its text is NVIDIA's,
    /// but for the path of the stand-in for `/proc/modules`.
    fn wrapper(&self, installed: &Path, modules: &Path, runc: &Path) -> String {
        let (folder, modules, says) = (installed.display(), modules.display(), self.says);
        let check = format!("cat {modules} | grep -e \"^nvidia \" >/dev/null 2>&1");
        let begin = format!("#! /bin/sh\n{check}\nif [ \"${{?}}\" != \"0\" ]; then\n");
        let (runc, set) = match self.config {
            Config::Folder => ("runc".to_owned(), format!("XDG_CONFIG_HOME={folder}/.config")),
            Config::File => (
                runc.display().to_string(),
                format!("NVIDIA_CTK_CONFIG_FILE_PATH={}", config_in(installed).display()),
            ),
        };
        format!(
            "{begin}\techo \"nvidia driver modules are not yet loaded, invoking {runc} directly\"{says}\n\
             \texec {runc} \"$@\"\nfi\n{set} \\\nPATH={folder}:$PATH \\\n\
             \t{folder}/nvidia-container-runtime.real \\\n\t\t\"$@\"\n"
        )
    }
}

/// Where the driver is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Root {
    /// In the operator's driver container.
    Container,
    /// On the machine itself; [`Toolkit::drive_the_machine`] comes first.
    Machine,
}

impl Root {
    /// As the configuration has it.
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Container => "/run/nvidia/driver",
            Self::Machine => "/",
        }
    }

    /// For names of pods.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Container => "container",
            Self::Machine => "machine",
        }
    }

    /// The folder of specifications for it.
    fn specs(self) -> &'static str {
        match self {
            Self::Container => "cdi",
            Self::Machine => "cdi-machine",
        }
    }
}

/// What decides about a container that is created.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting {
    /// How names become devices.
    pub(crate) mode: Mode,
    /// Where the driver is.
    pub(crate) root: Root,
    /// `accept-nvidia-visible-devices-envvar-when-unprivileged`
    pub(crate) accepts_variable: bool,
    /// `accept-nvidia-visible-devices-as-volume-mounts`
    pub(crate) accepts_mounts: bool,
    /// `swarm-resource`, if it is not empty.
    pub(crate) swarm_resource: &'static str,
}

impl Default for Setting {
    /// The operator's, with its driver container.
    fn default() -> Self {
        Self {
            mode: Release::wanted().modes[0],
            root: Root::Container,
            accepts_variable: true,
            accepts_mounts: false,
            swarm_resource: "",
        }
    }
}

/// The installed toolkit.
pub(crate) struct Toolkit {
    installed: PathBuf,
    work: PathBuf,
    runc: PathBuf,
}

impl Toolkit {
    /// Installs what was built in `built`. The module is loaded.
    pub(crate) fn new(built: &Path, work: &Path, programs: &Programs) -> Result<Self, String> {
        let installed = work.join("toolkit");
        let toolkit = Self { installed, work: work.to_owned(), runc: programs.runc.clone() };
        let folder = &toolkit.installed;
        let config = config_in(folder);
        std::fs::create_dir_all(config.parent().expect("it is in a folder"))
            .map_err(|error| format!("no folder: {error}"))?;
        for (name, program) in [
            ("nvidia-container-runtime.real", "nvidia-container-runtime"),
            ("nvidia-ctk.real", "nvidia-ctk"),
            ("nvidia-cdi-hook", "nvidia-cdi-hook"),
            (OLD_HOOK, OLD_HOOK),
        ] {
            let (link, program) = (folder.join(name), built.join(program));
            let _older = std::fs::remove_file(&link);
            std::os::unix::fs::symlink(program, link)
                .map_err(|error| format!("no program: {error}"))?;
        }
        toolkit.load_module();
        toolkit.set(&Setting::default());
        let wrapper = Release::wanted().wrapper(folder, &toolkit.modules(), &toolkit.runc);
        let here = folder.display();
        let ctk =
            format!("#! /bin/sh\nPATH={here}:$PATH \\\n\t{here}/nvidia-ctk.real \\\n\t\t\"$@\"\n");
        for (program, text) in [(toolkit.program(), wrapper), (folder.join("nvidia-ctk"), ctk)] {
            std::fs::write(&program, text).map_err(|error| format!("no wrapper: {error}"))?;
            said_by(Command::new("chmod").arg("755").arg(program))?;
        }
        Ok(toolkit)
    }

    /// What containerd starts in place of runc.
    pub(crate) fn program(&self) -> PathBuf {
        self.installed.join("nvidia-container-runtime")
    }

    /// Puts the driver where the operator's container has it, and writes the specification of all GPUs.
    pub(crate) fn enter(&self, cage: &Cage, driver: &Driver) -> Result<(), String> {
        let place = Root::Container.path();
        let script = r#"mkdir -p "$2" && mount --bind "$1" "$2""#;
        let driver = driver.root().display().to_string();
        cage.said("sh", &["-c", script, "driver", &driver, place])?;
        self.specify(cage, Root::Container)
    }

    /// Puts the driver on the machine itself, as a package does; in the cage alone. The error says why that
    /// cannot be tried here.
    pub(crate) fn drive_the_machine(&self, cage: &Cage, driver: &Driver) -> Result<(), String> {
        driver.lead_to_the_loader()?;
        let driver = driver.root().display().to_string();
        cage.said("sh", &["-c", ON_THE_MACHINE, "driver", &driver])?;
        self.specify(cage, Root::Machine)
    }

    /// Writes the specification of all GPUs, as the operator's installer does.
    fn specify(&self, cage: &Cage, root: Root) -> Result<(), String> {
        let specs = self.work.join(root.specs());
        std::fs::create_dir_all(&specs).map_err(|error| format!("no folder: {error}"))?;
        let config =
            format!("NVIDIA_CTK_CONFIG_FILE_PATH={}", config_in(&self.installed).display());
        let program = self.installed.join("nvidia-ctk").display().to_string();
        let hook = self.installed.join("nvidia-cdi-hook");
        let flags = [
            format!("--driver-root={}", root.path()),
            format!("--nvidia-cdi-hook-path={}", hook.display()),
            format!("--output={}", specs.join("management.yaml").display()),
        ];
        let mut all = vec![config.as_str(), &program, "cdi", "generate", "--mode=management"];
        all.push("--vendor=management.nvidia.com");
        all.extend(flags.iter().map(String::as_str));
        cage.said("env", &all).map(drop)
    }

    /// The stand-in for `/proc/modules`.
    fn modules(&self) -> PathBuf {
        self.work.join("modules")
    }

    /// The driver is loaded, as it is at first.
    pub(crate) fn load_module(&self) {
        let text = "nvidia_uvm 1 0 - Live 0x0\nnvidia 1 1 nvidia_uvm, Live 0x0\n";
        std::fs::write(self.modules(), text).expect("the work folder is writable");
    }

    /// The driver is not loaded, as for minutes after a boot.
    pub(crate) fn unload_module(&self) {
        std::fs::write(self.modules(), "overlay 1 0 - Live 0x0\n")
            .expect("the work folder is writable");
    }

    /// Changes the configuration, for containers that are created from now on.
    pub(crate) fn set(&self, setting: &Setting) {
        let swarm = match setting.swarm_resource {
            "" => String::new(),
            name => format!("swarm-resource = \"{name}\"\n"),
        };
        // `load-kmods` is off so that no kernel module of this machine changes.
        let text = format!(
            "accept-nvidia-visible-devices-envvar-when-unprivileged = {}\n\
             accept-nvidia-visible-devices-as-volume-mounts = {}\n{swarm}\
             [nvidia-container-cli]\nroot = \"{}\"\nload-kmods = false\n\
             [nvidia-container-runtime]\nmode = \"{}\"\nruntimes = [\"{}\"]\ndebug = \"{}\"\n\
             [nvidia-container-runtime.modes.cdi]\n\
             annotation-prefixes = [\"cdi.k8s.io/\"]\n\
             default-kind = \"management.nvidia.com/gpu\"\nspec-dirs = [\"{}\"]\n\
             [nvidia-container-runtime-hook]\npath = \"{}\"\nskip-mode-detection = true\n\
             [nvidia-ctk]\npath = \"{}\"\n",
            setting.accepts_variable,
            setting.accepts_mounts,
            setting.root.path(),
            setting.mode.name(),
            self.runc.display(),
            self.work.join("nvidia-runtime.log").display(),
            self.work.join(setting.root.specs()).display(),
            self.installed.join(OLD_HOOK).display(),
            self.installed.join("nvidia-ctk").display(),
        );
        // In one step: a container may be created at any time.
        let next = self.work.join("nvidia-runtime.next");
        std::fs::write(&next, text).expect("the work folder is writable");
        std::fs::rename(next, config_in(&self.installed)).expect("the work folder is writable");
    }
}

/// The configuration of an installed toolkit.
fn config_in(installed: &Path) -> PathBuf {
    installed.join(".config/nvidia-container-runtime/config.toml")
}

/// Device nodes and libraries of the driver `$1`, beside those of the machine.
const ON_THE_MACHINE: &str = r#"
set -e
others="$(ls /usr/lib64 | grep -v '^ld-linux' || true)"
[ -d /usr/lib64 ] && [ -z "$others" ] || { echo "/usr/lib64 is in use" >&2; exit 1; }
base=/run/nvidia/machine
mkdir -p $base/new $base/work
for kept in pts shm; do
    [ -d /dev/$kept ] || continue
    mkdir $base/$kept
    mount --rbind /dev/$kept $base/$kept
done
mount -t overlay overlay -o "lowerdir=$1/dev:/dev,upperdir=$base/new,workdir=$base/work" /dev
for kept in pts shm; do
    [ -d $base/$kept ] || continue
    mount --rbind $base/$kept /dev/$kept
done
mount --bind "$1/usr/lib64" /usr/lib64
"#;
