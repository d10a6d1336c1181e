use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};

use super::*;

/// As the kernel writes it, with names that begin or end with ours.
const DEVICES: &str = "Character devices:\n  1 mem\n195 nvidia\n236 nvidia-caps-imex-channels\n\
                       237 nvidia-caps\n238 my nvidia-caps\n\nBlock devices:\n  8 sd\n240 nvidia-caps\n";

const MAJOR: u32 = 237;

/// The instance of all tests, and what the driver says of it and of its compute instance.
const INSTANCE: InstanceNumber = InstanceNumber { gpu: 3, id: 9 };
const ACCESS: [(&str, &str); 2] = [
    ("access", "DeviceFileMinor: 412\nDeviceFileMode: 292\nDeviceFileModify: 1\n"),
    ("ci0/access", "DeviceFileMinor: 413\nDeviceFileMode: 292\nDeviceFileModify: 1\n"),
];

/// A node with a driver, in a folder.
struct Node(tempfile::TempDir);

impl Node {
    fn new() -> Self {
        let node = Self(tempfile::tempdir().unwrap());
        node.write("proc/devices", DEVICES);
        for (file, text) in ACCESS {
            node.write(&format!("proc/driver/nvidia/capabilities/gpu3/mig/gi9/{file}"), text);
        }
        std::fs::create_dir_all(node.path("dev")).unwrap();
        node
    }

    /// A path on the node.
    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join("1/root").join(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn access(&self, file: &str, text: &str) {
        self.write(&format!("proc/driver/nvidia/capabilities/gpu3/mig/gi9/{file}"), text);
    }

    fn ensure(&self) -> Result<(), String> {
        let nodes = DeviceNodes::new(self.0.path(), vec![PathBuf::from(OPERATORS_ROOT)]);
        nodes.ensure(INSTANCE).map_err(|error| error.to_string())
    }

    /// What is in a folder of nodes: name, numbers and mode of each device node, other things by name.
    fn nodes(&self, dev: &str) -> Vec<String> {
        let caps = self.path(dev).join(CAPS);
        let entries = std::fs::read_dir(caps).into_iter().flatten().flatten();
        let mut all: Vec<String> = entries.map(|entry| told(&entry)).collect();
        all.sort();
        all
    }
}

fn told(entry: &std::fs::DirEntry) -> String {
    let name = entry.file_name().into_string().unwrap();
    let about = entry.path().symlink_metadata().unwrap();
    if !about.file_type().is_char_device() {
        return format!("{name} other");
    }
    let mode = about.permissions().mode() & 0o7777;
    format!("{name} {}:{} {mode:o} {}", major(about.rdev()), minor(about.rdev()), about.uid())
}

/// Whether device nodes can be made here; says so if not.
fn can_make_nodes() -> bool {
    let folder = tempfile::tempdir().unwrap();
    let (name, mode) = (folder.path().join("node"), Mode::from_raw_mode(0o600));
    let made = mknodat(CWD, &name, FileType::CharacterDevice, mode, makedev(MAJOR, 1));
    if made.is_err() {
        println!("skipped: no device node can be made without root");
    }
    made.is_ok()
}

const BOTH: [&str; 2] = ["nvidia-cap412 237:412 444 0", "nvidia-cap413 237:413 444 0"];

#[test]
fn both_nodes_are_made_on_the_node_and_in_a_driver_root_that_has_devices() {
    if !can_make_nodes() {
        return;
    }
    let node = Node::new();
    std::fs::create_dir_all(node.path("dev/char")).unwrap();
    node.ensure().unwrap();
    assert_eq!(node.nodes("dev"), BOTH);
    assert!(!node.path("run").exists(), "there is no driver container");
    let link = std::fs::read_link(node.path("dev/char/237:413")).unwrap();
    assert_eq!(link, Path::new("../nvidia-caps/nvidia-cap413"));
    // The driver's container came, and was made again.
    for _ in 0..2 {
        std::fs::create_dir_all(node.path("run/nvidia/driver/dev")).unwrap();
        node.ensure().unwrap();
        assert_eq!(node.nodes("run/nvidia/driver/dev"), BOTH);
        std::fs::remove_dir_all(node.path("run/nvidia/driver")).unwrap();
    }
    let before = node.path("dev/nvidia-caps/nvidia-cap412").metadata().unwrap().ino();
    node.ensure().unwrap();
    let now = node.path("dev/nvidia-caps/nvidia-cap412").metadata().unwrap().ino();
    assert_eq!(before, now, "what is right stays");
}

#[test]
fn a_node_that_is_not_right_is_replaced_and_nothing_else_changes() {
    if !can_make_nodes() {
        return;
    }
    let node = Node::new();
    std::fs::create_dir_all(node.path("dev/nvidia-caps")).unwrap();
    let others =
        [("nvidia-cap412", 412, 0o444), ("nvidia-cap413", 9, 0o444), ("nvidia-cap1", 7, 0o600)];
    for (name, minor, mode) in others {
        let path = node.path("dev/nvidia-caps").join(name);
        let bits = Mode::from_raw_mode(mode);
        mknodat(CWD, &path, FileType::CharacterDevice, bits, makedev(MAJOR, minor)).unwrap();
    }
    // Left by a crash.
    let left = node.path("dev/nvidia-caps/.nvidia-cap413.gpupack");
    let bits = Mode::from_raw_mode(0o600);
    mknodat(CWD, &left, FileType::CharacterDevice, bits, makedev(1, 3)).unwrap();
    node.write("dev/nvidia-caps/README", "of people");
    node.ensure().unwrap();
    let mut expected: Vec<String> = BOTH.map(str::to_owned).to_vec();
    expected.extend(["nvidia-cap1 237:7 600 0", "README other"].map(str::to_owned));
    expected.sort();
    assert_eq!(node.nodes("dev"), expected);
    // Rights that somebody took away.
    let path = node.path("dev/nvidia-caps/nvidia-cap412");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o400)).unwrap();
    node.ensure().unwrap();
    assert_eq!(node.nodes("dev"), expected);
}

#[test]
fn what_has_the_name_of_a_node_stays_and_is_named() {
    let made = |node: &Node, name: &str| node.path("dev/nvidia-caps").join(name);
    let node = Node::new();
    std::fs::create_dir_all(node.path("dev/nvidia-caps")).unwrap();
    node.write("secret", "of the node");
    symlink(node.path("secret"), made(&node, "nvidia-cap412")).unwrap();
    let path = "`/dev/nvidia-caps/nvidia-cap412` of the node is";
    assert!(node.ensure().unwrap_err().starts_with(&format!("{path} a link: remove it")));
    assert_eq!(std::fs::read_to_string(node.path("secret")).unwrap(), "of the node");
    std::fs::remove_file(made(&node, "nvidia-cap412")).unwrap();
    std::fs::write(made(&node, "nvidia-cap412"), "").unwrap();
    assert!(node.ensure().unwrap_err().starts_with(&format!("{path} a file: remove it")));
    std::fs::remove_file(made(&node, "nvidia-cap412")).unwrap();
    std::fs::create_dir(made(&node, "nvidia-cap412")).unwrap();
    assert!(node.ensure().unwrap_err().starts_with(&format!("{path} a folder: remove it")));
    // The folder itself, and one above it.
    std::fs::remove_dir_all(node.path("dev/nvidia-caps")).unwrap();
    std::fs::create_dir(node.path("elsewhere")).unwrap();
    symlink(node.path("elsewhere"), node.path("dev/nvidia-caps")).unwrap();
    let error = node.ensure().unwrap_err();
    assert!(error.starts_with("`/dev/nvidia-caps` of the node is a link, or no folder"), "{error}");
    std::fs::remove_file(node.path("dev/nvidia-caps")).unwrap();
    std::fs::remove_dir(node.path("dev")).unwrap();
    symlink(node.path("elsewhere"), node.path("dev")).unwrap();
    let error = node.ensure().unwrap_err();
    assert!(error.starts_with("`/dev` of the node is a link, or no folder"), "{error}");
    assert_eq!(std::fs::read_dir(node.path("elsewhere")).unwrap().count(), 0);
}

#[test]
fn files_of_the_driver_that_say_too_little_are_named() {
    let node = Node::new();
    let file = "/proc/driver/nvidia/capabilities/gpu3/mig/gi9/ci0/access";
    let unclear =
        format!("the driver's file `{file}` does not say which device node an instance has");
    for text in
        ["", "DeviceFileMinor\n", "DeviceFileMinor: -1\n", "DeviceFileMinor: 1048576\n", "\u{0}"]
    {
        node.access("ci0/access", text);
        assert_eq!(node.ensure(), Err(unclear.clone()), "{text:?}");
    }
    node.access("ci0/access", &format!("{}DeviceFileMinor: 1\n", " ".repeat(8 << 10)));
    assert_eq!(node.ensure(), Err(unclear), "no more than its beginning is read");
    let gi = node.path("proc/driver/nvidia/capabilities/gpu3/mig/gi9");
    std::fs::remove_dir_all(gi.join("ci0")).unwrap();
    assert!(node.ensure().unwrap_err().contains("`capabilities/gpu3/mig/gi9/ci*/access`"));
    std::fs::remove_dir_all(gi).unwrap();
    assert!(node.ensure().unwrap_err().contains("`capabilities/gpu3/mig/gi9/access`"));
    std::fs::remove_dir_all(node.path("")).unwrap();
    let error = node.ensure().unwrap_err();
    assert!(error.contains("`hostPID` and `privileged`"), "{error}");
    // A container that does not see the processes of the node would make nodes for itself.
    let node = Node::new();
    symlink("1", node.0.path().join("self")).unwrap();
    let error = node.ensure().unwrap_err();
    assert!(error.contains("(process 1 is the agent)"), "{error}");
}

#[test]
fn a_driver_that_lets_no_program_make_nodes_is_obeyed() {
    let node = Node::new();
    for (file, text) in ACCESS {
        node.access(file, &text.replace("Modify: 1", "Modify: 0"));
    }
    let error = node.ensure().unwrap_err();
    assert!(error.contains("`/dev/nvidia-caps/nvidia-cap412` is missing, and"), "{error}");
    assert!(node.nodes("dev").is_empty());
    if !can_make_nodes() {
        return;
    }
    for minor in [412, 413] {
        let path = node.path(&format!("dev/nvidia-caps/nvidia-cap{minor}"));
        let bits = Mode::from_raw_mode(0o660);
        mknodat(CWD, path, FileType::CharacterDevice, bits, makedev(MAJOR, minor)).unwrap();
    }
    node.ensure().unwrap();
    assert!(node.nodes("dev")[0].ends_with("412 640 0"), "with the rights that people gave it");
}

#[test]
fn the_major_number_is_that_of_exactly_this_name() {
    assert_eq!(listed_major(DEVICES), Some(MAJOR));
    assert_eq!(
        listed_major("Character devices:\n195 nvidia\n\nBlock devices:\n9 nvidia-caps\n"),
        None
    );
    for bad in [
        "",
        "237 nvidia-caps",
        "Character devices:\n0 nvidia-caps",
        "Character devices:\n4096 nvidia-caps",
    ] {
        assert_eq!(listed_major(bad), None, "{bad}");
    }
    let node = Node::new();
    node.write("proc/devices", "Character devices:\n195 nvidia\n");
    assert_eq!(node.ensure(), Ok(()), "a driver that has no such nodes needs none");
}

#[test]
fn rights_are_what_the_driver_says_without_more() {
    let mode = |text: &str| parsed(&format!("DeviceFileMinor: 5\n{text}"), MAJOR).unwrap().mode;
    assert_eq!(mode("DeviceFileMode: 292"), 0o444);
    assert_eq!(mode("DeviceFileMode: 438"), 0o666);
    assert_eq!(mode(""), 0o444);
    assert_eq!(mode("DeviceFileMode: 4294967295"), 0o777);
    assert_eq!(mode("DeviceFileMode: x"), 0o444);
}
