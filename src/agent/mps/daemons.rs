//! The MPS control daemons on this node, one per GPU: whether each serves, and, with
//! `--mps manage`, that each runs.
//!
//! A daemon without a server has no client. A server that lost its GPU vanishes while its clients
//! go on without limits. So the list of servers is watched, not only the daemon. Daemons always end
//! with the agent's container, because its processes are killed with it.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::process::Child;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinHandle, JoinSet};

use crate::gpu::library_gate::LibraryGate;
use crate::mps::clients::Unanswered;
use crate::mps::control::Control;
use crate::mps::{clients, memory, selinux};
use crate::processes::pods::PodsByProcess;
use runtime::clock::Clock;
use wire::api::condition::MpsState;
use wire::api::state::DeviceKind;
use wire::report::bodies::DeviceReport;
use wire::units::Timestamp;

/// Time between two checks of a daemon: the same as between two regular lists of processes.
pub const QUERY_EVERY: Duration = Duration::from_secs(5);

/// Pause before an ended daemon is started again; it doubles each time.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Longest such pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Checks without an answer after which the agent kills its daemon and starts it again.
const MISSES_MAX: u32 = 3;

/// Checks between two sweeps of shared memory; in time also the least age of what is removed.
const LOOKS_PER_SWEEP: u32 = 12;

/// How long a daemon may take to end on request.
const END_WITHIN: Duration = Duration::from_secs(3);

/// Shared memory, in the folder of all daemons.
const SHARED_MEMORY: &str = "shm";

/// The mode of a node's shared memory: open to all users, as `/dev/shm` is.
const SHARED_MEMORY_MODE: u32 = 0o1777;

/// The process that starts the daemons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duty {
    /// Another one: the agent only checks them.
    Rely,
    Manage,
}

/// Settings of the daemons.
#[derive(Clone, Debug)]
pub struct MpsSettings {
    /// Folder with a folder `<UUID>/pipe` for each GPU, as in the configuration of the webhook.
    pub folder: PathBuf,
    pub program: PathBuf,
    /// The process that starts them.
    pub duty: Duty,
    /// Time between two checks of each.
    pub query_every: Duration,
    /// Where the host's process table is mounted.
    pub proc_root: PathBuf,
}

/// The daemons of a node; a handle, cheap to copy.
#[derive(Clone, Debug)]
pub struct MpsDaemons {
    shared: Arc<SharedDaemons>,
}

#[derive(Debug)]
struct SharedDaemons {
    settings: MpsSettings,
    clock: Clock,
    /// Whether the driver may be open; without one it may.
    gate: Option<LibraryGate>,
    /// The devices of the node.
    devices: watch::Sender<Devices>,
    /// The clients whose limits are being read.
    unanswered: Unanswered,
    /// The state of each daemon at the last check.
    known: Mutex<BTreeMap<String, (MpsState, Timestamp)>>,
}

/// The devices of the node that can have a daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Devices {
    /// By UUID: the process that starts the daemon.
    duties: BTreeMap<String, Duty>,
    /// Whether all daemons are to end.
    is_over: bool,
}

/// The loops of a node's daemons, until `end`.
#[derive(Debug)]
pub struct MpsLoops {
    daemons: MpsDaemons,
    loops: JoinHandle<()>,
}

impl MpsDaemons {
    /// Without any device.
    pub fn new(settings: MpsSettings, clock: Clock) -> Self {
        Self::gated(settings, clock, None)
    }

    /// The same, where those that the agent runs end while the driver may not be open. One that has clients stays:
    /// these have the driver open themselves.
    pub fn gated(settings: MpsSettings, clock: Clock, gate: Option<LibraryGate>) -> Self {
        let devices = watch::Sender::new(Devices::default());
        let (unanswered, known) = (Unanswered::default(), Mutex::default());
        let shared = SharedDaemons { settings, clock, gate, devices, unanswered, known };
        Self { shared: Arc::new(shared) }
    }

    /// Learns the devices. The agent never manages MIG instances: another process's daemon may
    /// serve them.
    pub fn learn(&self, inventory: &[DeviceReport]) {
        let devices = inventory.iter().filter(|device| is_plain(&device.uuid));
        let duties = devices.filter_map(|device| match device.kind {
            DeviceKind::Gpu => Some((device.uuid.clone(), self.shared.settings.duty)),
            DeviceKind::MigInstance => Some((device.uuid.clone(), Duty::Rely)),
            DeviceKind::MigParent => None,
        });
        let duties: BTreeMap<String, Duty> = duties.collect();
        self.shared.devices.send_if_modified(|known| {
            let is_new = known.duties != duties;
            known.duties = duties;
            is_new
        });
    }

    /// The state of a device's daemon at the last check; `None` if that is too long ago.
    pub fn state(&self, uuid: &str, now: Timestamp) -> Option<MpsState> {
        let known = self.shared.known.lock();
        let (state, asked) = known.get(uuid)?;
        (now.since(*asked) <= 3 * self.shared.settings.query_every).then_some(*state)
    }

    /// Whether a daemon that the agent runs has clients: they end with it.
    pub(crate) async fn have_clients(&self) -> bool {
        let duties = self.shared.devices.borrow().duties.clone();
        for (uuid, _) in duties.iter().filter(|(_, duty)| **duty == Duty::Manage) {
            // A daemon that does not say may have some, unless none was there at the last check.
            let is_there = |known: &(MpsState, Timestamp)| known.0 != MpsState::Absent;
            let may_have = self.shared.known.lock().get(uuid).is_none_or(is_there);
            if self.shared.control(uuid).has_clients().await.unwrap_or(may_have) {
                return true;
            }
        }
        false
    }

    /// The limit of the process `pid` on a device as a client of its daemon, in MiB; `None` if no
    /// limit is known.
    pub(crate) fn limit_mib(&self, pods: &PodsByProcess, pid: u32, uuid: &str) -> Option<u64> {
        let named = uuid.to_owned();
        self.query(pods, pid, uuid, move |process, pipes, own| {
            clients::limit_mib(process, &named, pipes, own)
        })
    }

    /// What `read` finds of a process, from its folder, the pipes of a device's daemon, and the agent's own folder.
    fn query<T: Send + 'static>(
        &self,
        pods: &PodsByProcess,
        pid: u32,
        uuid: &str,
        read: impl FnOnce(&Path, &Path, &Path) -> Option<T> + Send + 'static,
    ) -> Option<T> {
        let process = pods.folder_of(pid);
        let pipes = self.shared.control(uuid).pipes;
        let own = self.shared.settings.proc_root.join("self");
        let asked = process.clone();
        self.shared.unanswered.query(process, move || read(&asked, &pipes, &own))
    }

    /// Starts the loops for the devices of [`MpsDaemons::learn`].
    pub fn start(&self) -> MpsLoops {
        let shared = Arc::clone(&self.shared);
        MpsLoops { daemons: self.clone(), loops: tokio::spawn(look_after(shared)) }
    }
}

impl MpsLoops {
    /// Ends the daemons that the agent manages. Takes some seconds at most.
    pub async fn end(self) {
        self.daemons.shared.devices.send_modify(|devices| devices.is_over = true);
        let mut loops = self.loops;
        if tokio::time::timeout(2 * END_WITHIN, &mut loops).await.is_err() {
            loops.abort();
        }
    }
}

impl SharedDaemons {
    /// Whether the driver may not be open now.
    fn is_closed(&self) -> bool {
        self.gate.as_ref().is_some_and(|gate| gate.keeps_closed().is_some())
    }

    fn control(&self, uuid: &str) -> Control {
        let folder = self.settings.folder.join(uuid);
        let (pipes, logs) = (folder.join("pipe"), folder.join("log"));
        Control { program: self.settings.program.clone(), pipes, logs }
    }

    /// Notes the state of a daemon, and logs changes.
    fn note(&self, uuid: &str, state: MpsState) {
        let mut known = self.known.lock();
        let before = known.insert(uuid.to_owned(), (state, self.clock.now()));
        if before.map(|(before, _)| before) == Some(state) {
            return;
        }
        match state {
            MpsState::Absent | MpsState::Faulted => {
                tracing::warn!(gpu = uuid, ?state, "MPS limits no pod on this GPU");
            }
            MpsState::Idle | MpsState::Starting | MpsState::Serving | MpsState::Other => {
                tracing::info!(gpu = uuid, ?state, "MPS");
            }
        }
    }
}

/// Whether the name of a folder can have this UUID in it as it is.
fn is_plain(uuid: &str) -> bool {
    !uuid.is_empty() && uuid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

/// Keeps one loop for each device, until all have to end.
async fn look_after(shared: Arc<SharedDaemons>) {
    let mut news = shared.devices.subscribe();
    let mut keepers = JoinSet::new();
    let mut running: BTreeMap<String, AbortHandle> = BTreeMap::new();
    let mut sweeps = tokio::time::interval(LOOKS_PER_SWEEP * shared.settings.query_every);
    sweeps.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut sweeping: Option<JoinHandle<()>> = None;
    loop {
        let devices = news.borrow_and_update().clone();
        if devices.is_over {
            break;
        }
        // If a device went and came back, its old loop may still be ending: the new one waits.
        running.retain(|_, keeper| !keeper.is_finished());
        for (uuid, duty) in devices.duties {
            running
                .entry(uuid)
                .or_insert_with_key(|uuid| keepers.spawn(Keeper::new(&shared, uuid, duty).keep()));
        }
        tokio::select! {
            _ = news.changed() => {}
            Some(_) = keepers.join_next() => {}
            // A sweep may be slow and blocks nothing. At the end it is left alone.
            _ = sweeps.tick() => if sweeping.as_ref().is_none_or(JoinHandle::is_finished) {
                sweeping = Some(tokio::spawn(sweep(shared.settings.clone())));
            },
        }
    }
    while keepers.join_next().await.is_some() {}
}

/// Removes what clients left in shared memory, if the agent manages it and no client lives.
async fn sweep(settings: MpsSettings) {
    let folder = settings.folder.join(SHARED_MEMORY);
    if settings.duty != Duty::Manage || !folder.is_dir() {
        return;
    }
    let (shown, proc_root) = (folder.clone(), settings.proc_root);
    let spared = LOOKS_PER_SWEEP * settings.query_every;
    let swept = tokio::task::spawn_blocking(move || memory::sweep(&folder, &proc_root, spared));
    match swept.await {
        Ok(Ok(0)) | Err(_) => {}
        Ok(Ok(removed)) => tracing::info!(removed, "removed what clients of MPS left in memory"),
        Ok(Err(error)) => {
            let folder = shown.display();
            tracing::warn!(%folder, %error, "cannot tell whether clients of MPS are left: nothing is removed");
        }
    }
}

/// Manages the daemon of one device.
struct Keeper {
    shared: Arc<SharedDaemons>,
    control: Control,
    uuid: String,
    duty: Duty,
    /// The daemon, if the agent started it and it runs.
    daemon: Option<Child>,
    /// The earliest time for its start.
    next_start: Timestamp,
    /// The pause after its next end.
    pause: Duration,
    /// Checks without an answer since its start.
    misses: u32,
}

impl Keeper {
    fn new(shared: &Arc<SharedDaemons>, uuid: &str, duty: Duty) -> Self {
        Self {
            control: shared.control(uuid),
            shared: Arc::clone(shared),
            uuid: uuid.to_owned(),
            duty,
            daemon: None,
            next_start: Timestamp::START,
            pause: FIRST_PAUSE,
            misses: 0,
        }
    }

    async fn keep(mut self) {
        let mut news = self.shared.devices.subscribe();
        loop {
            let is_wanted = {
                let devices = news.borrow_and_update();
                !devices.is_over && devices.duties.get(&self.uuid) == Some(&self.duty)
            };
            if !is_wanted {
                break;
            }
            let state = self.control.state().await;
            self.shared.note(&self.uuid, state);
            if self.duty == Duty::Manage {
                match self.shared.is_closed() {
                    true => self.rest(state).await,
                    false => self.mind(state),
                }
            }
            tokio::select! {
                () = tokio::time::sleep(self.time_to_next_look()) => {}
                () = ended(&mut self.daemon) => self.bury(),
                _ = news.changed() => {}
            }
        }
        self.end().await;
    }

    /// Starts the daemon if none answers, and kills the agent's own if it does not answer.
    fn mind(&mut self, state: MpsState) {
        let now = self.shared.clock.now();
        match (state, &self.daemon) {
            (MpsState::Absent, None) if now >= self.next_start => self.start(now),
            (MpsState::Absent, None) => {}
            (MpsState::Absent, Some(_)) => self.miss(),
            (_, _) => {
                self.misses = 0;
                if now >= self.next_start.plus(LONGEST_PAUSE) {
                    self.pause = FIRST_PAUSE;
                }
            }
        }
    }

    /// Counts a check that the agent's daemon did not answer, and kills it after some.
    fn miss(&mut self) {
        self.misses += 1;
        if let Some(daemon) = self.daemon.as_mut().filter(|_| self.misses >= MISSES_MAX) {
            tracing::warn!(gpu = self.uuid, "the MPS daemon does not answer: it is killed");
            // On an error it has ended already, which the next check sees.
            let _ = daemon.start_kill();
        }
    }

    /// Ends the daemon without clients: its server keeps the driver open after the last one. One that does not answer
    /// keeps it, too.
    async fn rest(&mut self, state: MpsState) {
        if self.daemon.is_none() {
            return;
        }
        if state == MpsState::Absent {
            return self.miss();
        }
        self.misses = 0;
        if self.control.has_clients().await != Some(false) {
            return;
        }
        tracing::info!(gpu = self.uuid, "the MPS daemon ends while the driver is replaced");
        self.control.quit().await;
        let _ = tokio::time::timeout(END_WITHIN, ended(&mut self.daemon)).await;
        self.daemon = None; // dropping kills it
        (self.next_start, self.pause) = (self.shared.clock.now(), FIRST_PAUSE);
    }

    fn start(&mut self, now: Timestamp) {
        let prepared = prepare(&self.shared.settings.folder, &self.control);
        match prepared.and_then(|()| self.control.start(&self.uuid)) {
            Ok(daemon) => {
                tracing::info!(gpu = self.uuid, "started the MPS daemon");
                self.daemon = Some(daemon);
                self.misses = 0;
            }
            Err(error) => {
                let program = self.control.program.display();
                tracing::error!(gpu = self.uuid, %program, %error, "the MPS daemon cannot be started: `--mps manage` takes root, NVIDIA's control program and a folder that can be written");
            }
        }
        self.next_start = now.plus(self.pause);
        self.pause = (2 * self.pause).min(LONGEST_PAUSE);
    }

    /// Notes that the agent's daemon has ended unexpectedly.
    fn bury(&mut self) {
        self.daemon = None;
        self.next_start = self.shared.clock.now().plus(self.pause);
        tracing::warn!(gpu = self.uuid, pause = ?self.pause, "the MPS daemon has ended");
        self.shared.note(&self.uuid, MpsState::Absent);
    }

    /// Time to the next check. A daemon that was just started is checked when its pause is over.
    fn time_to_next_look(&self) -> Duration {
        let every = self.shared.settings.query_every;
        let until_start = self.next_start.since(self.shared.clock.now());
        match self.duty {
            Duty::Manage if !until_start.is_zero() => every.min(until_start),
            Duty::Manage | Duty::Rely => every,
        }
    }

    /// Ends the daemon if the agent started it.
    async fn end(mut self) {
        if self.daemon.is_some() {
            self.control.quit().await;
            if tokio::time::timeout(END_WITHIN, ended(&mut self.daemon)).await.is_err() {
                tracing::warn!(gpu = self.uuid, "the MPS daemon does not end: it is killed");
            }
        }
        self.shared.known.lock().remove(&self.uuid);
    }
}

/// Waits until the daemon has ended; forever if there is none.
async fn ended(daemon: &mut Option<Child>) {
    match daemon {
        Some(daemon) => {
            let _ = daemon.wait().await;
        }
        None => std::future::pending().await,
    }
}

/// Creates the folders of a daemon.
fn prepare(folder: &Path, control: &Control) -> std::io::Result<()> {
    let shared_memory = folder.join(SHARED_MEMORY);
    for made in [&control.pipes, &control.logs, &shared_memory] {
        std::fs::create_dir_all(made)?;
    }
    let everybodys = std::fs::Permissions::from_mode(SHARED_MEMORY_MODE);
    std::fs::set_permissions(&shared_memory, everybodys)?;
    for made in [&control.pipes, &control.logs, &shared_memory] {
        selinux::label(made, Path::new(selinux::KERNEL))?;
    }
    Ok(())
}
