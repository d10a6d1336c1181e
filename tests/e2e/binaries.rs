//! Where etcd, kube-apiserver and kube-scheduler come from.
//!
//! `KUBEBUILDER_ASSETS` works as in envtest: etcd and kube-apiserver from there, and
//! kube-scheduler too if it is there. What is missing is built from `controlplane/` with Go, into
//! `$GPUPACK_TESTBED_CACHE` or `~/.cache/gpupack-testbed`, under the hash of its sources and of
//! Go's version. Nothing is ever built into the repository. Kubelet, which few scenarios need, is
//! built when the first of them runs.
//!
//! `GPUPACK_KUBERNETES` names another version of Kubernetes to build and test with, of those in
//! [`VERSIONS`]. It has a folder of the cache for itself, and changes nothing of what
//! `KUBEBUILDER_ASSETS` gives.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::clock;

/// A version of Kubernetes from which the programs can be built.
struct Version {
    /// Its name in `GPUPACK_KUBERNETES`.
    name: &'static str,
    /// What the built API server and scheduler say their version is.
    says: [&'static str; 3],
    /// The file that chooses the modules; their checksums are beside it, in a file `.sum`.
    modules: &'static str,
}

/// The versions; the first is built unless another is named. The other is the lowest that is supported
/// (docs/operations.md).
static VERSIONS: [Version; 2] = [
    Version { name: "1.36", says: ["v1.36.3", "1", "36"], modules: "go.mod" },
    Version { name: "1.32", says: ["v1.32.13", "1", "32"], modules: "go-1.32.mod" },
];

/// The version to build.
fn version() -> &'static Version {
    let Some(wanted) = clock::variable("GPUPACK_KUBERNETES") else { return &VERSIONS[0] };
    let found = VERSIONS.iter().find(|version| version.name == wanted);
    let known = VERSIONS.each_ref().map(|version| version.name);
    found.unwrap_or_else(|| panic!("GPUPACK_KUBERNETES must be one of {known:?}, not `{wanted}`"))
}

/// What the API server says its version is, such as `v1.36.3`.
pub(crate) fn kubernetes_version() -> &'static str {
    version().says[0]
}

impl Version {
    /// The sources of the programs; also what the cache folder is named after.
    fn sources(&self) -> [String; 4] {
        let sums = self.modules.replace(".mod", ".sum");
        [self.modules.to_owned(), sums, "main.go".to_owned(), "kubelet/main.go".to_owned()]
    }
}

/// What makes the control plane a cluster, for the one scenario that needs that.
#[derive(Debug, Clone)]
pub(crate) struct ClusterPrograms {
    /// kube-controller-manager.
    pub(crate) controllers: PathBuf,
    /// kube-proxy.
    pub(crate) proxy: PathBuf,
    /// CoreDNS.
    pub(crate) dns: PathBuf,
}

/// The three programs.
#[derive(Debug, Clone)]
pub(crate) struct Binaries {
    /// etcd.
    pub(crate) etcd: PathBuf,
    /// kube-apiserver.
    pub(crate) kube_apiserver: PathBuf,
    /// kube-scheduler.
    pub(crate) kube_scheduler: PathBuf,
}

/// Finds or builds the programs. The error says why the tests must be skipped.
pub(crate) fn find() -> Result<Binaries, String> {
    let Some(assets) = clock::path_variable("KUBEBUILDER_ASSETS").map(PathBuf::from) else {
        return Ok(all_in(&build()?));
    };
    let given = all_in(&assets);
    for program in [&given.etcd, &given.kube_apiserver] {
        if !program.is_file() {
            return Err(format!("KUBEBUILDER_ASSETS is set but has no {}", program.display()));
        }
    }
    if given.kube_scheduler.is_file() {
        return Ok(given);
    }
    let kube_scheduler = build()?.join("kube-scheduler");
    Ok(Binaries { kube_scheduler, ..given })
}

fn all_in(folder: &Path) -> Binaries {
    Binaries {
        etcd: folder.join("etcd"),
        kube_apiserver: folder.join("kube-apiserver"),
        kube_scheduler: folder.join("kube-scheduler"),
    }
}

/// Finds or builds kubelet: with the others in `KUBEBUILDER_ASSETS`, or in the cache.
pub(crate) fn kubelet() -> Result<PathBuf, String> {
    let given = clock::path_variable("KUBEBUILDER_ASSETS").map(|it| Path::new(&it).join("kubelet"));
    if let Some(given) = given.filter(|given| given.is_file()) {
        return Ok(given);
    }
    let folder = folder_of(&go_version(&sources())?)?;
    // The command of an older kubelet is made by another call than `kubelet/main.go` has.
    if version().name != VERSIONS[0].name {
        return Err(format!("kubelet is built for Kubernetes {} alone", VERSIONS[0].name));
    }
    let program = folder.join("kubelet");
    if !program.is_file() {
        say("building kubelet, once: a minute or two on two cores");
        compile("./kubelet", &folder, &["kubelet"])?;
    }
    Ok(program)
}

/// Finds or builds kube-controller-manager, kube-proxy and CoreDNS, in the cache.
pub(crate) fn cluster_programs() -> Result<ClusterPrograms, String> {
    let network = in_module("network", &["kube-controller-manager", "kube-proxy"])?;
    let dns = in_module("dns", &["coredns"])?.join("coredns");
    let [controllers, proxy] =
        ["kube-controller-manager", "kube-proxy"].map(|name| network.join(name));
    Ok(ClusterPrograms { controllers, proxy, dns })
}

/// Finds or builds kube-controller-manager alone.
pub(crate) fn controllers() -> Result<PathBuf, String> {
    let name = "kube-controller-manager";
    Ok(in_module("network", &[name, "kube-proxy"])?.join(name))
}

/// Finds or builds the program of a module beside the control plane. Returns its folder.
fn in_module(module: &str, names: &[&str]) -> Result<PathBuf, String> {
    let files = ["go.mod", "go.sum", "main.go"].map(|file| format!("{module}/{file}"));
    let folder = folder_of_files(&go_version(&sources())?, &files)?;
    if !names.iter().all(|name| folder.join(name).is_file()) {
        say(&format!("building {}, once: a minute or two on two cores", names.join(" and ")));
        compile_in(&sources().join(module), ".", &folder, names)?;
    }
    Ok(folder)
}

/// The module of Kueue, whose own files choose the others and know their checksums.
const KUEUE: &str = "sigs.k8s.io/kueue@v0.15.2";

/// Modules that Kueue is built with, and the definitions of their resources in them.
const KINDS: [(&str, &str); 2] = [
    ("sigs.k8s.io/jobset@v0.10.1", "config/components/crd/bases"),
    ("sigs.k8s.io/lws@v0.7.0", "config/crd/bases"),
];

/// Kueue: its program, and the folder with its sources and configuration.
#[derive(Debug, Clone)]
pub(crate) struct KueueProgram {
    /// The controller.
    pub(crate) program: PathBuf,
    /// The module.
    pub(crate) sources: PathBuf,
    /// Folders with definitions of resources: JobSets, LeaderWorkerSets.
    pub(crate) kinds: Vec<PathBuf>,
}

/// Finds or builds Kueue, in the cache.
pub(crate) fn kueue() -> Result<KueueProgram, String> {
    let go = go_version(&sources())?;
    let sources = module(KUEUE)?;
    let mut key = Fnv::default();
    key.add(go.as_bytes());
    key.add(KUEUE.as_bytes());
    let folder = cache()?.join(format!("{:016x}", key.0));
    let program = folder.join("kueue");
    if !program.is_file() {
        say(&format!("building {KUEUE}, once: 6 minutes on two cores, 2 GiB of memory"));
        let main = "./cmd/kueue";
        // All modules that it needs, from Go's own cache or downloaded into it.
        let listed =
            Command::new("go").args(["list", "-deps", main]).current_dir(&sources).output();
        let listed = listed.map_err(|error| format!("Go cannot be started ({error})"))?;
        if !listed.status.success() {
            let said = String::from_utf8_lossy(&listed.stderr);
            return Err(format!("the modules of {KUEUE} cannot be had: {said}"));
        }
        compile_in(&sources, main, &folder, &["kueue"])?;
    }
    let kinds = KINDS.iter().map(|(name, folder)| Ok(module(name)?.join(folder)));
    Ok(KueueProgram { program, sources, kinds: kinds.collect::<Result<_, String>>()? })
}

/// Builds the control plane unless the cache has it. Returns the folder with the three names.
fn build() -> Result<PathBuf, String> {
    let go = go_version(&sources())?;
    let folder = folder_of(&go)?;
    if folder.join("kube-scheduler").is_file() {
        return Ok(folder);
    }
    let [kubernetes, ..] = version().says;
    say(&format!(
        "building the control plane {kubernetes} with {go}, once: some minutes on two cores, 2 GiB of memory"
    ));
    compile(".", &folder, &["etcd", "kube-apiserver", "kube-scheduler"])?;
    Ok(folder)
}

/// The folder with the sources of a module of Go, `PATH@VERSION`, from Go's own cache or downloaded into
/// it. The error says why it cannot be had.
pub(crate) fn module(name: &str) -> Result<PathBuf, String> {
    let output = Command::new("go").args(["mod", "download", "-json", name]).output();
    let output = output.map_err(|error| format!("Go cannot be started ({error})"))?;
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    match answer["Dir"].as_str() {
        Some(folder) => Ok(PathBuf::from(folder)),
        None => Err(format!("`go mod download {name}` fails: {}", answer["Error"])),
    }
}

/// Prints progress, also if the test harness hides the output of passing tests.
pub(crate) fn say(text: &str) {
    let _shown = writeln!(std::io::stderr(), "{text}");
}

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e/controlplane")
}

/// The folder of the cache for the sources of the control plane and this Go.
fn folder_of(go: &str) -> Result<PathBuf, String> {
    folder_of_files(go, &version().sources())
}

fn folder_of_files(go: &str, files: &[impl AsRef<str>]) -> Result<PathBuf, String> {
    let mut key = Fnv::default();
    key.add(go.as_bytes());
    for file in files.iter().map(AsRef::as_ref) {
        let text = std::fs::read(sources().join(file));
        key.add(&text.map_err(|error| format!("{file} of the control plane: {error}"))?);
    }
    Ok(cache()?.join(format!("{:016x}", key.0)))
}

fn go_version(sources: &Path) -> Result<String, String> {
    let output = Command::new("go").arg("version").current_dir(sources).output();
    let output = output.map_err(|error| {
        format!("KUBEBUILDER_ASSETS is not set and Go cannot be started ({error})")
    })?;
    if !output.status.success() {
        return Err(format!("`go version` fails: {}", String::from_utf8_lossy(&output.stderr)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// The folder of everything that is built for the tests.
pub(crate) fn cache() -> Result<PathBuf, String> {
    if let Some(folder) = clock::path_variable("GPUPACK_TESTBED_CACHE") {
        return Ok(PathBuf::from(folder));
    }
    let home = clock::path_variable("HOME")
        .ok_or("neither GPUPACK_TESTBED_CACHE nor HOME is set: no place for the control plane")?;
    Ok(Path::new(&home).join(".cache/gpupack-testbed"))
}

/// A build that cannot be finished is a failure of the test, not a reason to skip it: Go is there.
fn compile(main: &str, folder: &Path, names: &[&str]) -> Result<(), String> {
    compile_in(&sources(), main, folder, names)
}

fn compile_in(module: &Path, main: &str, folder: &Path, names: &[&str]) -> Result<(), String> {
    std::fs::create_dir_all(folder)
        .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
    let program = folder.join(format!("built.{}", std::process::id()));
    let chosen = version();
    // The other modules have one version each.
    let modules = if module == sources() { chosen.modules } else { "go.mod" };
    let [version, major, minor] = chosen.says;
    let package = "k8s.io/component-base/version";
    let flags = format!(
        "-s -w -X {package}.gitVersion={version} -X {package}.gitMajor={major} -X {package}.gitMinor={minor}"
    );
    let built = Command::new("go")
        .args(["build", "-trimpath", "-ldflags", &flags])
        .args([&format!("-modfile={modules}"), "-o"])
        .arg(&program)
        .arg(main)
        .current_dir(module)
        .status()
        .expect("go was found just before");
    assert!(built.success(), "go build of {names:?} failed: {built}");
    for name in names {
        let link = folder.join(name);
        let _absent = std::fs::remove_file(&link);
        std::fs::hard_link(&program, &link)
            .map_err(|error| format!("cannot create {}: {error}", link.display()))?;
    }
    std::fs::remove_file(&program)
        .map_err(|error| format!("cannot remove {}: {error}", program.display()))
}

/// FNV-1a, 64 bits: stable over Rust versions, which `DefaultHasher` does not promise.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}
