//! The loop that makes and removes MIG instances as they are ordered.
//!
//! It runs beside the sampler, on a thread of its own: a change can take seconds, and reports go on
//! meanwhile. It opens the library for the time of a round; while the probe has it open, too, that
//! only counts. After each change the sampler is woken, so that the extender soon knows the UUID.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::watch;

use crate::gpu::library_gate::LibraryGate;
use crate::gpu::sample::ProbeError;
use crate::mig::attempts::Attempts;
use crate::mig::device_nodes::DeviceNodes;
use crate::mig::kept_nodes::{KeptNodes, LookedAt, standings};
use crate::mig::on_demand::MigOnDemand;
use crate::mig::plan;
use crate::mig::plan::{Layouts, MigOrder, MigPlan, MigStep, Obstacle, Unfinished, Work};
use crate::nvml::instances;
use crate::nvml::instances::{KnownProfiles, Looked, Round, StepError};
use crate::nvml::library::{LIBRARY, open};
use runtime::clock::Clock;
use wire::report::bodies::MigOrders;
use wire::units::Timestamp;

/// Time between two looks at the instances while orders stand: others may change them.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Time between two looks without orders, for what a crash has left.
const LOOK_WITHOUT_ORDERS: Duration = Duration::from_secs(60);

/// Makes and removes MIG instances.
#[derive(Debug)]
pub struct MigMaker {
    library: PathBuf,
    on_demand: MigOnDemand,
    clock: Clock,
    attempts: Attempts,
    profiles: KnownProfiles,
    adoption: Adoption,
    /// Whether the library may be open; without one it may.
    gate: Option<LibraryGate>,
    /// The devices that kubelet hands out, once these are known.
    of_kubelet: watch::Receiver<Option<BTreeSet<String>>>,
    /// The device nodes of what was made here; without it none are made.
    nodes: Option<KeptNodes>,
}

/// Whose instances it has yet to take over.
#[derive(Debug)]
enum Adoption {
    /// None.
    Done,
    /// Those on all GPUs but the devices that kubelet hands out, once these are known.
    All,
    /// Those on these GPUs, which have not answered yet.
    Rest(BTreeSet<String>),
}

/// One half of a round: what to remove, or what to make.
type Planner = fn(&MigOrders, &Layouts, &[Unfinished]) -> MigPlan;

/// How a round ended.
enum RoundEnd {
    /// All was done that can be done now.
    Done,
    Overtaken,
}

impl MigMaker {
    /// Obeys `on_demand` by `library`, or by NVIDIA's own by default. `of_kubelet` are the devices that kubelet hands
    /// out, once these are known.
    pub fn new(
        library: Option<PathBuf>,
        on_demand: MigOnDemand,
        clock: Clock,
        of_kubelet: watch::Receiver<Option<BTreeSet<String>>>,
    ) -> Self {
        let library = library.unwrap_or_else(|| PathBuf::from(LIBRARY));
        Self {
            library,
            on_demand,
            clock,
            attempts: Attempts::default(),
            profiles: KnownProfiles::new(),
            adoption: Adoption::Done,
            gate: None,
            of_kubelet,
            nodes: None,
        }
    }

    /// Takes over the instances first that others have made, but those that kubelet hands out.
    #[must_use]
    pub fn adopting(self) -> Self {
        Self { adoption: Adoption::All, ..self }
    }

    /// Opens the library only while this allows it.
    #[must_use]
    pub fn with_gate(self, gate: LibraryGate) -> Self {
        Self { gate: Some(gate), ..self }
    }

    /// Makes the device nodes of the instances that it makes. None is reported before it has them.
    #[must_use]
    pub fn with_nodes(self, nodes: DeviceNodes) -> Self {
        Self { nodes: Some(KeptNodes::new(nodes)), ..self }
    }

    fn is_closed(&self) -> bool {
        self.gate.as_ref().is_some_and(|gate| gate.keeps_closed().is_some())
    }

    /// Runs forever.
    pub async fn run(mut self) {
        let on_demand = self.on_demand.clone();
        loop {
            let round = tokio::task::spawn_blocking(move || {
                let pause = self.round();
                (self, pause)
            });
            let pause = match round.await {
                Ok((back, pause)) => {
                    self = back;
                    pause
                }
                Err(error) => {
                    // A bug; nothing is made any more, and the devices are reported all the same.
                    return tracing::error!(%error, "MIG instances are no longer made");
                }
            };
            tokio::select! {
                () = on_demand.ordered() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Carries out what is ordered now. Returns the time until the next look.
    fn round(&mut self) -> Duration {
        if self.is_closed() {
            return LOOK_EVERY;
        }
        if let Err(error) = self.adopt() {
            tracing::warn!(%error, "cannot take over MIG instances of others, trying again");
        }
        if let Some(nodes) = &mut self.nodes {
            nodes.renew();
            self.on_demand.note_nodeless(nodes.nodeless());
        }
        loop {
            if self.is_closed() {
                return LOOK_EVERY;
            }
            let orders = self.on_demand.orders();
            let has_orders = !orders.make.is_empty() || !orders.remove.is_empty();
            if !has_orders && !self.has_to_look() {
                self.settle(&BTreeSet::new());
                return self.longest_without_orders();
            }
            match self.obey(&orders) {
                Ok(RoundEnd::Overtaken) => continue,
                Ok(RoundEnd::Done) => {}
                Err(error) => self.fail_all(&orders, &error),
            }
            let longest = if has_orders { LOOK_EVERY } else { self.longest_without_orders() };
            let now = self.clock.now();
            let again = self.attempts.next().map(|at| at.since(now).max(Duration::from_millis(1)));
            return again.map_or(longest, |again| again.min(longest));
        }
    }

    /// Whether nodes of instances are to be kept.
    fn keeps_nodes(&self) -> bool {
        self.nodes.is_some() && self.on_demand.made().count() > 0
    }

    /// Whether the instances have to be looked at though nothing is ordered.
    fn has_to_look(&self) -> bool {
        !self.on_demand.made().unfinished().is_empty() || self.expects_look()
    }

    /// Whether it is not known yet which instances have nodes to keep.
    fn expects_look(&self) -> bool {
        self.keeps_nodes() && self.nodes.as_ref().is_some_and(KeptNodes::expects_look)
    }

    fn longest_without_orders(&self) -> Duration {
        match self.adoption {
            Adoption::Done if !self.keeps_nodes() => LOOK_WITHOUT_ORDERS,
            Adoption::Done | Adoption::All | Adoption::Rest(_) => LOOK_EVERY,
        }
    }

    /// Takes over the instances that others have made on the GPUs that answer. Orders are obeyed meanwhile.
    fn adopt(&mut self) -> Result<(), String> {
        let rest = match &self.adoption {
            Adoption::Done => return Ok(()),
            Adoption::All => None,
            Adoption::Rest(rest) => Some(rest),
        };
        let of_kubelet = self.of_kubelet.borrow().clone();
        let of_kubelet = of_kubelet.ok_or("kubelet has not said yet which devices it hands out")?;
        let nvml = open(&self.library).map_err(|error| error.to_string())?;
        let all = Looked::AtAll;
        let layouts = instances::layouts(&mut Round::new(&nvml), all, &mut self.profiles);
        let mut layouts = layouts.map_err(|error| error.to_string())?;
        if let Some(rest) = rest {
            layouts.gpus.retain(|gpu| rest.contains(&gpu.uuid));
            layouts.unread.retain(|gpu, _| rest.contains(gpu));
        }
        let count = self.on_demand.made().adopt(&layouts.gpus, &of_kubelet);
        let count = count.map_err(|error| error.to_string())?;
        if count > 0 {
            tracing::info!(
                count,
                "took over MIG instances that others made: idle ones are removed"
            );
            self.nodes.iter_mut().for_each(KeptNodes::expect_look);
            self.on_demand.note_change();
        }
        let Some((gpu, error)) = layouts.unread.first_key_value() else {
            self.adoption = Adoption::Done;
            return Ok(());
        };
        let error = format!("GPU `{gpu}` does not answer: {error}");
        self.adoption = Adoption::Rest(layouts.unread.into_keys().collect());
        Err(error)
    }

    /// Removes and then makes, with one look at the instances before each.
    fn obey(&mut self, orders: &MigOrders) -> Result<RoundEnd, ProbeError> {
        let nvml = open(&self.library)?;
        let mut round = Round::new(&nvml);
        let mut open_orders = BTreeSet::new();
        let concerned = self.on_demand.made().concerned(orders);
        let is_whole = self.expects_look();
        for plan in [plan::removals as Planner, plan::makes] {
            let looked = if is_whole { Looked::AtAll } else { Looked::At(&concerned) };
            let mut layouts = instances::layouts(&mut round, looked, &mut self.profiles)?;
            let unfinished = self.look(&round, &mut layouts);
            if is_whole && layouts.unread.is_empty() {
                self.nodes.iter_mut().for_each(KeptNodes::note_look);
            }
            let own = self.on_demand.made().own(orders);
            let mut plan = plan(&own, &layouts, &unfinished);
            open_orders.extend(plan.orders());
            for (order, error) in std::mem::take(&mut plan.failures) {
                self.attempts.refuse(order, error);
            }
            self.on_demand.note_failures(self.attempts.failures());
            self.attempts.hold_back(&mut plan, self.clock.now());
            for step in &plan.steps {
                if self.on_demand.orders() != *orders || self.is_closed() {
                    return Ok(RoundEnd::Overtaken);
                }
                match self.carry_out(&round, step) {
                    Ok(None) => {
                        open_orders.remove(&step.order);
                        self.attempts.succeed(&step.order);
                        self.on_demand.note_failures(self.attempts.failures());
                    }
                    Err(error) => {
                        self.fail(&step.order, step.refused(error), self.clock.now());
                    }
                    Ok(Some(obstacle)) => {
                        self.attempts.refuse(step.order.clone(), obstacle);
                        self.on_demand.note_failures(self.attempts.failures());
                    }
                }
                self.on_demand.note_change();
            }
        }
        self.settle(&open_orders);
        Ok(RoundEnd::Done)
    }

    /// Lets what was made here have device nodes, and notes what became of what was begun. Returns what is still begun.
    fn look(&mut self, round: &Round<'_>, layouts: &mut Layouts) -> Vec<Unfinished> {
        if let Some(nodes) = &mut self.nodes {
            for gpu in &mut layouts.gpus {
                let standings = standings(&self.on_demand.made(), gpu);
                let minor = instances::minor_number(round, &gpu.uuid);
                layouts.nodeless.extend(nodes.look(LookedAt { gpu, minor }, &standings));
            }
            self.on_demand.note_nodeless(nodes.nodeless());
        }
        let mut made = self.on_demand.made();
        if let Err(error) = made.settle(&layouts.gpus) {
            tracing::warn!(%error, "the list of MIG instances made here cannot be written");
        }
        made.unfinished().to_vec()
    }

    /// Carries out one step, and notes it before and after. Returns why the instance that it made is not ready.
    fn carry_out(&mut self, round: &Round<'_>, step: &MigStep) -> Result<Option<Obstacle>, String> {
        let begun = self.on_demand.made().begin(step.begun.clone());
        begun.map_err(|error| {
            format!("the list of instances made here cannot be written (`--mig-folder`): {error}")
        })?;
        let under_way = self.on_demand.begin_change(self.clock.now());
        let began = self.clock.precise();
        let outcome = instances::carry_out(round, step);
        drop(under_way);
        let took = self.clock.precise().saturating_sub(began);
        let (gpu, profile, start) =
            (&step.begun.gpu, &step.order.place.profile, step.begun.slot.start);
        let (work, millis) = (step.work, took.as_millis());
        match &outcome {
            Ok(()) => tracing::info!(gpu, profile, start, ?work, millis, "changed a MIG instance"),
            Err(error) => {
                tracing::warn!(
                    gpu,
                    profile,
                    start,
                    ?work,
                    millis,
                    %error,
                    "cannot change a MIG instance"
                );
            }
        }
        if let Err(StepError::Anothers) = outcome
            && let Err(error) = self.on_demand.made().disown(&step.begun)
        {
            tracing::warn!(%error, "the list of MIG instances made here cannot be written");
        }
        let mut layouts = Layouts::default();
        match instances::layout_of(round, gpu, &mut self.profiles) {
            Ok(layout) => {
                if outcome.is_err() && !matches!(step.work, Work::Remove(_)) {
                    self.on_demand.made().refused(&step.begun, &layout);
                }
                layouts.gpus.push(layout);
                drop(self.look(round, &mut layouts));
            }
            // The next round notes what became of it.
            Err(error) => tracing::warn!(%error, "MIG instances cannot be read"),
        }
        outcome.map(|()| layouts.nodeless_at(&step.begun)).map_err(|error| error.to_string())
    }

    fn fail(&mut self, order: &MigOrder, obstacle: Obstacle, now: Timestamp) {
        self.attempts.fail(order, obstacle, now);
        self.on_demand.note_failures(self.attempts.failures());
    }

    /// Keeps the failures of these orders alone, and shows them.
    fn settle(&mut self, open_orders: &BTreeSet<MigOrder>) {
        self.attempts.keep(open_orders);
        self.on_demand.note_failures(self.attempts.failures());
    }

    /// Notes that nothing can be made, because the library does not answer.
    fn fail_all(&mut self, orders: &MigOrders, error: &ProbeError) {
        let all: BTreeSet<MigOrder> = orders.make.iter().cloned().map(MigOrder::to_make).collect();
        for order in &all {
            self.attempts.refuse(order.clone(), error.to_string());
        }
        self.settle(&all);
    }
}
