//! What may go wrong, and what happens at random times.

use rand::Rng;
use rand::seq::IndexedRandom;
use runtime::step::outside::StepEvent;

use super::agents;
use super::nodes::Gpu;
use super::{GPU_MIB, What, World, mig};

/// A process that was frozen for less need not notice it.
const SHORT: u64 = 3_000;

/// In seconds.
const TEN_YEARS: i64 = 3_650 * 86_400;

macro_rules! faults {
    ($($(#[doc = $text:literal])+ $name:ident,)+; $($(#[doc = $mig:literal])+ $of_mig:ident,)+;
     $($(#[doc = $driver:literal])+ $of_driver:ident,)+) => {
        /// A kind of fault. A seed has about half of them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub(super) enum Fault {
            $($(#[doc = $text])+ $name,)+
            $($(#[doc = $mig])+ $of_mig,)+
            $($(#[doc = $driver])+ $of_driver,)+
        }

        impl Fault {
            pub(super) const ALL: &[Self] = &[$(Self::$name,)+ $(Self::$of_mig,)+ $(Self::$of_driver,)+];
            pub(super) const WITHOUT_MIG: &[Self] = &[$(Self::$name,)+];
            pub(super) const OF_MIG: &[Self] = &[$(Self::$of_mig,)+];
            /// What NVIDIA's tools do with drivers.
            pub(super) const OF_UPGRADES: [Self; 4] =
                [Self::DriverUpgrade, Self::UpgradeDrain, Self::UpgradeFailure, Self::MigChange];
            /// What ends or freezes the process that serves.
            pub(super) const OF_PROCESS: [Self; 4] = [Self::Crash, Self::Freeze, Self::Overlap, Self::Stop];
        }
    };
}

faults! {
    /// The extender is killed, and starts again.
    Crash,
    /// It is frozen, and goes on.
    Freeze,
    /// Another process takes the place of a frozen one.
    Overlap,
    /// It gets SIGTERM.
    Stop,
    /// Requests of the extender, or their answers, are lost.
    Loss,
    /// Requests arrive when no one waits for them any more.
    Delay,
    /// The API server answers 429 and 5xx, whether it did something or not.
    Overload,
    /// Pods change between read and write.
    Conflict,
    /// Patches of some pods are refused for a while.
    Denial,
    /// The API server cannot be reached for a while.
    Outage,
    /// Somebody sets the wall clock of a machine.
    ClockStep,
    /// Watches are behind.
    Lag,
    /// The watch shows changes twice, or begins again with a list.
    Relist,
    /// The watch of a process shows nothing for up to a minute and a half.
    StuckWatch,
    /// A follower hears nothing of pods and nodes for a while, and the leader may end meanwhile.
    Deaf,
    /// kube-scheduler restarts.
    SchedulerRestart,
    /// Answers to kube-scheduler are lost.
    GiveUp,
    /// A second kube-scheduler schedules the same pods, or pods of its own.
    SecondScheduler,
    /// kube-scheduler's own plugins, such as that for volumes, take seconds before *bind*.
    SlowPlugin,
    /// Calls of *filter* and *prioritize* that no bind follows.
    Trial,
    /// Calls about pods that do not exist, and binds that kube-scheduler did not decide.
    MadeUp,
    /// Pods of higher priority preempt others.
    Preemption,
    /// Users edit what gpupack wrote.
    Edit,
    /// Pods are deleted by force.
    Force,
    /// Nodes are cordoned.
    Cordon,
    /// An agent restarts.
    AgentRestart,
    /// An agent does not report for a while.
    Silence,
    /// Reports, or their replies, are lost.
    ReportLoss,
    /// Reports arrive late.
    ReportDelay,
    /// Reports without some of the processes or devices.
    PartialReport,
    /// Two agents report for one node.
    SecondAgent,
    /// An agent names a device of another node.
    Lie,
    /// A GPU is replaced by another one.
    Replacement,
    /// Pods use more memory than they request.
    OverLimit,
    /// The operator lets gpupack evict over-limit pods.
    Eviction,
    ;
    /// A node boots: its MIG instances are gone.
    Reboot,
    /// The driver refuses to make or to remove MIG instances, or a monitor has them open.
    MigRefused,
    /// It takes long.
    SlowMig,
    /// An administrator makes an instance.
    ForeignInstance,
    /// An agent that starts finds no list of the instances that an earlier one made.
    LostList,
    ;
    /// The GPU Operator upgrades the driver of one node after another.
    DriverUpgrade,
    /// It evicts the pods of a node before that.
    UpgradeDrain,
    /// Upgrades fail.
    UpgradeFailure,
    /// MIG Manager changes the GPUs of a node.
    MigChange,
    /// Containers of a node start without the driver.
    BlindStarts,
}

impl World {
    /// Whether such faults happen now.
    pub(super) fn has(&self, kind: Fault) -> bool {
        self.is_faulty() && self.settings.faults.contains(&kind)
    }

    /// Whether one happens, with this chance. The number is drawn in any case, so that a run without
    /// one kind of fault begins like the run with it.
    pub(super) fn hits(&mut self, kind: Fault, percent: u32) -> bool {
        let of = if self.settings.is_calm { 400 } else { 100 / self.settings.rate };
        let is_drawn = self.rng.random_range(0..of) < percent;
        is_drawn && self.has(kind)
    }

    /// From now on room may be left unused for this long.
    pub(super) fn disturb(&mut self, time: u64) {
        self.disturbed_until = self.disturbed_until.max(self.now + time);
    }

    /// Whether nothing else happens now.
    pub(super) fn is_resting(&self) -> bool {
        self.now < self.asleep_until
    }

    /// Lets nothing else happen for a while in half of the seeds: much that happens would hide a fault.
    pub(super) fn rest(&mut self, time: u64) {
        if self.settings.has_rests && self.rng.random_range(0..2) == 0 {
            self.asleep_until = self.now + time;
        }
    }

    /// Ends or freezes the process that serves. One that is killed starts again after this time.
    pub(super) fn break_process(&mut self, kind: Fault, time: u64) {
        let serving = self.serving_life();
        match kind {
            Fault::Freeze | Fault::Overlap => self.freeze(serving, kind == Fault::Overlap, 0),
            Fault::Stop => self.stop(serving),
            _ => self.kill(self.serving(), time),
        }
    }

    pub(super) fn chaos(&mut self) {
        if !self.is_faulty() {
            return;
        }
        if self.is_resting() {
            return self.after(self.asleep_until - self.now, What::Chaos);
        }
        let is_focused = self.settings.rate > 1;
        let slower = if self.settings.is_calm || is_focused { 4 } else { 1 };
        let time = self.rng.random_range(100..1_500) * slower;
        self.after(time, What::Chaos);
        let kinds = [
            Fault::Crash,
            Fault::Freeze,
            Fault::Overlap,
            Fault::Stop,
            Fault::Denial,
            Fault::Outage,
            Fault::SchedulerRestart,
            Fault::Cordon,
            Fault::AgentRestart,
            Fault::Silence,
            Fault::SecondAgent,
            Fault::Lie,
            Fault::Replacement,
            Fault::ClockStep,
            Fault::StuckWatch,
            Fault::Deaf,
        ];
        let is_possible = |kind: &Fault| !is_focused || self.settings.faults.contains(kind);
        let kinds: Vec<Fault> = kinds.into_iter().filter(is_possible).collect();
        let Some(kind) = kinds.choose(&mut self.rng).copied() else { return };
        let (time, node) =
            (self.rng.random_range(0..1_000), self.rng.random_range(0..self.nodes.len()));
        if !self.has(kind) {
            return;
        }
        self.disturb(20_000);
        match kind {
            Fault::Crash | Fault::Freeze | Fault::Overlap | Fault::Stop => {
                self.break_process(kind, time * 5);
            }
            Fault::Denial => self.deny_any(),
            Fault::Outage => self.outage_until = self.now + time * 8,
            Fault::SchedulerRestart => {
                let at = self.rng.random_range(0..self.schedulers.len());
                let time = if self.settings.has_rests { time * 15 } else { 0 };
                self.restart_scheduler(at, time);
            }
            Fault::Cordon => {
                self.nodes[node].is_cordoned ^= true;
                self.note_left(self.nodes[node].name.clone());
                self.nodes_changed();
            }
            Fault::AgentRestart => self.restart_agent(node),
            Fault::Silence => self.nodes[node].silent_until = self.now + time * 40,
            Fault::SecondAgent => self.second_agent(node),
            Fault::ClockStep => self.set_wall_clock(),
            Fault::StuckWatch => self.stick_watch(time * 90),
            Fault::Deaf => self.empty_and_deafen(),
            Fault::Lie => self.nodes[node].lies_until = self.now + time * 10,
            _ => self.replace_gpu(node),
        }
    }

    /// The connection of a watch is dead, and nobody has noticed yet.
    fn stick_watch(&mut self, time: u64) {
        let at = self.rng.random_range(0..self.replicas.len());
        let until = self.settings.faults_for.min(self.now + time);
        if let Some(replica) = &mut self.replicas[at] {
            replica.stuck_until = until;
        }
        self.disturb(until - self.now + 20_000);
    }

    /// Some pods end while kube-scheduler restarts. When it is back, and binds others in their room, a
    /// follower hears nothing of it.
    fn empty_and_deafen(&mut self) {
        if !self.has(Fault::SchedulerRestart) {
            return self.deafen();
        }
        let placed = self.api.pods.iter().filter(|(_, pod)| pod.is_placed());
        let placed: Vec<String> = placed.map(|(uid, _)| uid.clone()).collect();
        let ended: Vec<String> = placed.choose_multiple(&mut self.rng, 6).cloned().collect();
        ended.into_iter().for_each(|uid| self.end_pod(&uid));
        let time = self.rng.random_range(2_000..6_000);
        (0..self.schedulers.len()).for_each(|by| self.restart_scheduler(by, time));
        self.after(time, What::Deafens);
        self.disturb(time + 20_000);
    }

    /// The containers of a pod end.
    pub(super) fn end_pod(&mut self, uid: &str) {
        if let Some(pod) = self.api.pods.get_mut(uid).filter(|pod| pod.is_placed()) {
            pod.is_terminal = true;
            self.api.changed(uid);
        }
    }

    /// No report reaches a follower, and its watch shows nothing. Half of the time the leader ends
    /// meanwhile.
    pub(super) fn deafen(&mut self) {
        let leader = self.serving();
        let before = self.rng.random_range(500..3_000);
        let time = before + self.rng.random_range(2_000..8_000);
        let until = self.settings.faults_for.min(self.now + time);
        let followers: Vec<usize> = (0..self.replicas.len()).filter(|at| *at != leader).collect();
        let Some(at) = followers.choose(&mut self.rng).copied() else { return };
        let Some(replica) = &mut self.replicas[at] else { return };
        (replica.stuck_until, replica.deaf_until) = (until, until);
        if self.rng.random_range(0..2) == 0 {
            let life = self.serving_life();
            self.after(before, What::LeaderEnds { life, since: self.now });
        }
        self.disturb(time + 20_000);
    }

    /// A leader is killed, or gets SIGTERM. Some of the pods that were bound lately end or are gone
    /// before the next one leads.
    pub(super) fn leader_ends(&mut self, life: u64, since: u64) {
        let new = self.api.pods.iter().filter(|(_, pod)| pod.is_placed() && pod.bound >= since);
        let new: Vec<String> = new.map(|(uid, _)| uid.clone()).collect();
        let is_killed = self.rng.random_range(0..2) == 0;
        let most = if is_killed { 4_000 } else { 1_000 };
        for uid in new {
            let (time, kind) = (self.rng.random_range(0..most), self.rng.random_range(0..3));
            match kind {
                0 if self.has(Fault::Force) => self.after(time, What::Removed { uid }),
                1 => self.after(time, What::Ended { uid }),
                _ => {}
            }
        }
        match is_killed {
            true => self.crash(life),
            false => self.stop(life),
        }
    }

    /// Sets the wall clock of a machine: to the right time, or to another one.
    fn set_wall_clock(&mut self) {
        let at = self.rng.random_range(0..self.replicas.len());
        let ahead = *[0, -600, -2, 90, TEN_YEARS].choose(&mut self.rng).expect("not empty");
        let step = ahead - std::mem::replace(&mut self.clocks_ahead[at], ahead);
        if let Some(replica) = &self.replicas[at] {
            replica.step_wall(step);
        }
    }

    /// SIGKILL; the process starts again after this time. What it has sent may be on its way longer
    /// than that.
    pub(super) fn kill(&mut self, at: usize, time: u64) {
        let Some(replica) = self.replicas[at].take() else { return };
        self.after(50 + time, What::Start { to: at });
        if !self.hits(Fault::Delay, 50) {
            return;
        }
        let is_sent =
            |what: &What| matches!(what, What::Request { life, .. } if *life == replica.life);
        let sent: Vec<What> =
            self.agenda.extract_if(.., |_, what| is_sent(what)).map(|(_, what)| what).collect();
        for what in sent {
            let time = time + self.rng.random_range(0..1_000);
            self.after(time, what);
        }
    }

    /// The process dies now.
    pub(super) fn crash(&mut self, life: u64) {
        let at = self.replicas.iter().position(|it| it.as_ref().is_some_and(|it| it.life == life));
        if let Some(at) = at {
            self.disturb(20_000);
            let time = self.rng.random_range(0..2_000);
            self.kill(at, time);
        }
    }

    /// SIGSTOP, and SIGCONT later. With `is_replaced`, another process starts meanwhile.
    pub(super) fn freeze(&mut self, life: u64, is_replaced: bool, at_least: u64) {
        let time = self.rng.random_range(at_least.max(100)..15_000);
        let start = self.rng.random_range(100..4_000);
        let now = self.now;
        let at = self.replicas.iter().position(|it| it.as_ref().is_some_and(|it| it.life == life));
        let Some(at) = at else { return };
        let Some(replica) = self.replicas[at].as_mut().filter(|replica| !replica.is_frozen) else {
            return;
        };
        (replica.is_frozen, replica.frozen) = (true, now);
        self.disturb(20_000);
        self.after(time, What::Thaw { life });
        if is_replaced && self.overlapping.is_none() {
            self.overlapping = self.replicas[at].take();
            self.after(start, What::Start { to: at });
        }
    }

    pub(super) fn thaw(&mut self, life: u64) {
        let now = self.now;
        self.disturb(10_000);
        let Some(replica) = self.process_mut(life) else { return };
        replica.is_frozen = false;
        replica.thawed = now;
        replica.next_due = None;
        let inbox = std::mem::take(&mut replica.inbox);
        if now > replica.frozen + SHORT {
            replica.old.extend(inbox.iter().filter_map(agents::From::of));
        }
        for what in inbox {
            self.after(0, what);
        }
        if self.overlapping.as_ref().is_some_and(|replica| replica.life == life) {
            let time = self.rng.random_range(500..5_000);
            self.after(time, What::Buried { life });
        }
        self.step(life, StepEvent::Changed);
    }

    /// The kubelet ends the process that another one has replaced.
    pub(super) fn bury(&mut self, life: u64) {
        if self.overlapping.as_ref().is_some_and(|replica| replica.life == life) {
            self.overlapping = None;
        }
    }

    /// SIGTERM: the process posts nothing more, and ends a little later. One of several hands over.
    pub(super) fn stop(&mut self, life: u64) {
        let (now, is_alone) = (self.now, self.replicas.len() == 1);
        let time = self.rng.random_range(0..2_000);
        let Some(replica) = self.process_mut(life).filter(|replica| !replica.is_frozen) else {
            return;
        };
        replica.app.lead.leave();
        replica.left.get_or_insert(now);
        if is_alone {
            replica.stopping_since.get_or_insert(now);
        }
        self.disturb(20_000);
        let handover = if is_alone { 0 } else { 6_000 };
        self.after(200 + time + handover, What::Stopped { life });
        self.step(life, StepEvent::Changed);
    }

    pub(super) fn stopped(&mut self, life: u64) {
        let at = self.replicas.iter().position(|it| it.as_ref().is_some_and(|it| it.life == life));
        if let Some(at) = at {
            let time = self.rng.random_range(0..2_000);
            self.kill(at, time);
        }
    }

    fn deny_any(&mut self) {
        let waiting = self.api.pods.iter().filter(|(_, pod)| pod.node.is_none());
        let waiting: Vec<&String> = waiting.map(|(uid, _)| uid).collect();
        let chosen = waiting.choose(&mut self.rng).map(|uid| (*uid).clone());
        chosen.into_iter().for_each(|uid| self.deny(uid));
    }

    /// Refuses patches of a pod for a while: a webhook does not answer, or a role is missing.
    pub(super) fn deny(&mut self, uid: String) {
        let most = [10_000, 90_000][self.rng.random_range(0..2)];
        let time = self.rng.random_range(0..most);
        self.deny_for(uid, time);
    }

    pub(super) fn deny_for(&mut self, uid: String, time: u64) {
        let code = [403, 422][self.rng.random_range(0..2)];
        let time = time.min(self.settings.faults_for - self.now);
        self.api.denied.insert(uid.clone(), code);
        self.after(time, What::Allowed { uid });
    }

    /// The GPU breaks and another one takes its place: what ran on it ends.
    fn replace_gpu(&mut self, node: usize) {
        let at = self.rng.random_range(0..self.nodes[node].gpus.len());
        self.replaced += 1;
        let mib = if self.rng.random_range(0..2) == 0 { GPU_MIB } else { GPU_MIB / 2 };
        let mut gpu = Gpu { id: format!("node-{node}-{at}-{}", self.replaced), mib };
        let mut gone = vec![self.nodes[node].gpus[at].id.clone()];
        if let Some(mig) = &mut self.nodes[node].mig {
            gpu.mib = mig::GPU_MIB;
            gone.extend(mig.instances_of(&gone[0]));
            mig.replace(at, &gpu);
        }
        self.nodes[node].gpus[at] = gpu;
        self.nodes[node].devices_changed();
        let uses = |takes: &[(String, u64)]| takes.iter().any(|(id, _)| gone.contains(id));
        let ended: Vec<String> = self
            .processes
            .iter()
            .filter(|(_, process)| uses(&process.devices))
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in ended {
            self.processes.remove(&uid);
            if let Some(pod) = self.api.pods.get_mut(&uid) {
                pod.is_terminal = true;
                self.api.changed(&uid);
            }
        }
    }
}
