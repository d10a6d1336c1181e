//! NVIDIA's container runtime, configured as the GPU Operator does.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::driver::Driver;
use super::programs::{Programs, said_by};

/// How the runtime turns names of devices into devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The GPU Operator's: bare names are of the kind `management.nvidia.com/gpu`.
    Cdi,
    /// The default of the packages.
    Auto,
    /// Specifications made when a container is created.
    JitCdi,
}

impl Mode {
    /// All modes from release 1.20 on, except the old one and Tegra's.
    pub(crate) const ALL: [Self; 3] = [Self::Cdi, Self::Auto, Self::JitCdi];

    /// As the configuration has it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cdi => "cdi",
            Self::Auto => "auto",
            Self::JitCdi => "jit-cdi",
        }
    }
}

/// The configured runtime.
pub(crate) struct Toolkit {
    folder: PathBuf,
    work: PathBuf,
    driver: PathBuf,
    runc: PathBuf,
}

impl Toolkit {
    /// Writes configuration, wrapper and the specification of all GPUs; in mode `cdi`.
    pub(crate) fn new(
        folder: &Path,
        work: &Path,
        driver: &Driver,
        programs: &Programs,
    ) -> Result<Self, String> {
        let toolkit = Self {
            folder: folder.to_owned(),
            work: work.to_owned(),
            driver: driver.root().to_owned(),
            runc: programs.runc.clone(),
        };
        toolkit.set_mode(Mode::Cdi);
        let wrapper = format!(
            "#!/bin/sh\nexport NVIDIA_CTK_CONFIG_FILE_PATH={}\nexec {} \"$@\"\n",
            toolkit.config().display(),
            folder.join("nvidia-container-runtime").display()
        );
        std::fs::write(toolkit.program(), wrapper)
            .map_err(|error| format!("no wrapper: {error}"))?;
        said_by(Command::new("chmod").arg("755").arg(toolkit.program()))?;
        let specs = work.join("cdi");
        std::fs::create_dir_all(&specs).map_err(|error| format!("no folder: {error}"))?;
        let mut generate = Command::new(folder.join("nvidia-ctk"));
        generate.args(["cdi", "generate", "--mode=management", "--vendor=management.nvidia.com"]);
        generate.arg(format!("--driver-root={}", toolkit.driver.display()));
        let hook = folder.join("nvidia-cdi-hook");
        generate.arg(format!("--nvidia-cdi-hook-path={}", hook.display()));
        generate.arg(format!("--output={}", specs.join("management.yaml").display()));
        said_by(generate.env("NVIDIA_CTK_CONFIG_FILE_PATH", toolkit.config()))?;
        Ok(toolkit)
    }

    /// What containerd starts in place of runc.
    pub(crate) fn program(&self) -> PathBuf {
        self.work.join("nvidia-runtime")
    }

    fn config(&self) -> PathBuf {
        self.work.join("nvidia-runtime.toml")
    }

    /// Changes the mode, for containers that are created from now on.
    pub(crate) fn set_mode(&self, mode: Mode) {
        // `load-kmods` is off so that no kernel module of this machine changes.
        let text = format!(
            "[nvidia-container-cli]\nroot = \"{}\"\nload-kmods = false\n\
             [nvidia-container-runtime]\nmode = \"{}\"\nruntimes = [\"{}\"]\ndebug = \"{}\"\n\
             [nvidia-container-runtime.modes.cdi]\n\
             annotation-prefixes = [\"cdi.k8s.io/\"]\n\
             default-kind = \"management.nvidia.com/gpu\"\nspec-dirs = [\"{}\"]\n\
             [nvidia-ctk]\npath = \"{}\"\n",
            self.driver.display(),
            mode.name(),
            self.runc.display(),
            self.work.join("nvidia-runtime.log").display(),
            self.work.join("cdi").display(),
            self.folder.join("nvidia-ctk").display(),
        );
        // In one step: a container may be created at any time.
        let next = self.work.join("nvidia-runtime.next");
        std::fs::write(&next, text).expect("the work folder is writable");
        std::fs::rename(next, self.config()).expect("the work folder is writable");
    }
}
