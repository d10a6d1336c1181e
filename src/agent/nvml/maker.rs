//! The loop that makes and removes MIG instances as they are ordered.
//!
//! It runs beside the sampler, on a thread of its own: a change can take seconds, and reports go on
//! meanwhile. It opens the library for the time of a round; while the probe has it open, too, that
//! only counts. After each change the sampler is woken, so that the extender soon knows the UUID.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use nvml_wrapper::Nvml;
use tokio::sync::watch;

use crate::agent::gpu::probe::ProbeError;
use crate::agent::mig::attempts::Attempts;
use crate::agent::mig::on_demand::{MigOnDemand, Switching};
use crate::agent::mig::plan;
use crate::agent::mig::plan::{GpuLayout, Layouts, Order, Plan, Step, Unfinished};
use crate::agent::mig::switching::{Switch, Switches, obeyed, switches, to_whole};
use crate::agent::nvml::instances;
use crate::agent::nvml::instances::KnownProfiles;
use crate::agent::nvml::library::{LIBRARY, open};
use crate::agent::nvml::probe::HeldOpen;
use crate::clock::Clock;
use crate::hardware::units::Timestamp;
use crate::report::wire::{MigOrders, ObeyedOrders};

/// Time between two looks at the instances while orders stand: others may change them.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Time between two looks without orders, for what a crash has left.
const LOOK_WITHOUT_ORDERS: Duration = Duration::from_secs(60);

/// Makes and removes MIG instances.
#[derive(Debug)]
pub struct MigMaker {
    library: PathBuf,
    /// The library as the probe holds it open.
    probes: HeldOpen,
    on_demand: MigOnDemand,
    clock: Clock,
    attempts: Attempts,
    profiles: KnownProfiles,
    adoption: Adoption,
    /// The devices that kubelet hands out, once these are known.
    kubelets: watch::Receiver<Option<BTreeSet<String>>>,
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
type Planner = fn(&MigOrders, &Layouts, &[Unfinished]) -> Plan;

/// How a round ended.
enum Ended {
    /// All was done that can be done now.
    Done,
    /// Other orders stand.
    Overtaken,
}

impl MigMaker {
    /// Obeys `on_demand` by `library`, or by NVIDIA's own by default, which the probe of this process holds open, too.
    /// `kubelets` are the devices that kubelet hands out, once these are known.
    pub fn new(
        (library, probes): (Option<PathBuf>, HeldOpen),
        on_demand: MigOnDemand,
        clock: Clock,
        kubelets: watch::Receiver<Option<BTreeSet<String>>>,
    ) -> Self {
        let library = library.unwrap_or_else(|| PathBuf::from(LIBRARY));
        Self {
            library,
            probes,
            on_demand,
            clock,
            attempts: Attempts::default(),
            profiles: KnownProfiles::new(),
            adoption: Adoption::Done,
            kubelets,
        }
    }

    /// Takes over the instances first that others have made, but those that kubelet hands out.
    #[must_use]
    pub fn adopting(self) -> Self {
        Self { adoption: Adoption::All, ..self }
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
        if let Err(error) = self.adopt() {
            tracing::warn!(%error, "cannot take over MIG instances of others, trying again");
        }
        let longest_without_orders = match self.adoption {
            Adoption::Done => LOOK_WITHOUT_ORDERS,
            Adoption::All | Adoption::Rest(_) => LOOK_EVERY,
        };
        loop {
            let orders = self.on_demand.orders();
            let obeyed = self.on_demand.whole().unwrap_or_default();
            let has_orders = !orders.make.is_empty()
                || !orders.remove.is_empty()
                || self.on_demand.switches_mode() && !is_obeyed(&orders, &obeyed);
            if !has_orders && self.on_demand.made().unfinished().is_empty() {
                self.settle(&BTreeSet::new());
                return longest_without_orders;
            }
            match self.obey(&orders) {
                Ok(Ended::Overtaken) => continue,
                Ok(Ended::Done) => {}
                Err(error) => self.fail_all(&orders, &error),
            }
            let longest = if has_orders { LOOK_EVERY } else { longest_without_orders };
            let now = self.clock.now();
            let again = self.attempts.next().map(|at| at.since(now).max(Duration::from_millis(1)));
            return again.map_or(longest, |again| again.min(longest));
        }
    }

    /// Takes over the instances that others have made on the GPUs that answer. Orders are obeyed meanwhile.
    fn adopt(&mut self) -> Result<(), String> {
        let rest = match &self.adoption {
            Adoption::Done => return Ok(()),
            Adoption::All => None,
            Adoption::Rest(rest) => Some(rest),
        };
        let of_kubelet = self.kubelets.borrow().clone();
        let of_kubelet = of_kubelet.ok_or("kubelet has not said yet which devices it hands out")?;
        let nvml = open(&self.library).map_err(|error| error.to_string())?;
        let layouts = instances::layouts(&nvml, &mut self.profiles);
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

    /// Removes, switches and then makes, with one look at the instances before each.
    fn obey(&mut self, orders: &MigOrders) -> Result<Ended, ProbeError> {
        let nvml = open(&self.library)?;
        let (mut open_orders, mut not_switched) = (BTreeSet::new(), BTreeSet::new());
        for (plan, is_switched) in [(plan::removals as Planner, false), (plan::makes, true)] {
            if is_switched && self.on_demand.switches_mode() {
                match self.switch(&nvml, orders)? {
                    Some(failed) => not_switched = failed,
                    None => return Ok(Ended::Overtaken),
                }
                open_orders.extend(not_switched.iter().cloned());
            }
            let layouts = instances::layouts(&nvml, &mut self.profiles)?;
            let unfinished = self.look(&layouts.gpus);
            let own = self.on_demand.made().own(orders);
            let mut plan = plan(&own, &layouts, &unfinished);
            open_orders.extend(plan.orders());
            // Of a GPU that could not be switched it is known why.
            plan.failures.retain(|(order, _)| !not_switched.contains(order));
            for (order, error) in std::mem::take(&mut plan.failures) {
                self.attempts.refuse(order, error);
            }
            self.on_demand.note_failures(self.attempts.failures());
            self.attempts.hold_back(&mut plan, self.clock.now());
            for step in &plan.steps {
                if self.on_demand.orders() != *orders {
                    return Ok(Ended::Overtaken);
                }
                match self.carry_out(&nvml, step) {
                    Ok(()) => {
                        open_orders.remove(&step.order);
                    }
                    Err(error) => self.fail(&step.order, error, self.clock.now()),
                }
                self.on_demand.note_change();
            }
        }
        self.settle(&open_orders);
        Ok(Ended::Done)
    }

    /// Switches GPUs to and from MIG mode. The orders for which that could not be done; `None` if other orders
    /// stand now.
    fn switch(
        &mut self,
        nvml: &Nvml,
        orders: &MigOrders,
    ) -> Result<Option<BTreeSet<Order>>, ProbeError> {
        let layouts = instances::layouts(nvml, &mut self.profiles)?;
        let of_kubelet = self.kubelets.borrow().clone();
        let Switches { steps, failures } = switches(orders, &layouts, of_kubelet.as_ref());
        let mut failed = BTreeSet::new();
        for (order, error) in failures {
            self.attempts.refuse(order.clone(), error);
            failed.insert(order);
        }
        for Switch { gpu, to_mig, orders: for_it } in &steps {
            if for_it.iter().all(|order| self.attempts.waits(order, self.clock.now())) {
                failed.extend(for_it.iter().cloned());
                continue;
            }
            if self.on_demand.orders() != *orders {
                return Ok(None);
            }
            let outcome = self.change_mode(nvml, gpu, *to_mig);
            self.on_demand.note_change();
            match outcome {
                Ok(()) => tracing::info!(gpu, to_mig, "switched MIG mode"),
                Err(error) => {
                    tracing::warn!(gpu, to_mig, error, "cannot switch MIG mode");
                    for order in for_it {
                        self.fail(order, error.clone(), self.clock.now());
                        failed.insert(order.clone());
                    }
                }
            }
        }
        let layouts = match steps.is_empty() {
            true => layouts,
            false => instances::layouts(nvml, &mut self.profiles)?,
        };
        self.on_demand.obeys(obeyed(orders, &layouts));
        Ok(Some(failed))
    }

    /// Changes the mode of a GPU. Where the driver resets it for that, nothing else of this process uses it then.
    fn change_mode(&self, nvml: &Nvml, gpu: &str, to_mig: bool) -> Result<(), String> {
        if !instances::needs_reset(nvml, gpu) {
            return instances::switch(nvml, gpu, to_mig);
        }
        match self.on_demand.switching() {
            Switching::WithReset => {
                let outcome = self.probes.closed(|| instances::switch(nvml, gpu, to_mig));
                outcome.unwrap_or_else(|| Err("a sample of this agent does not end".to_owned()))
            }
            Switching::Never | Switching::WithoutReset => {
                Err("the driver resets this GPU to change its MIG mode, which \
                the agent lets it do with `--mig-reset` only"
                    .to_owned())
            }
        }
    }

    /// Notes what became of what was begun. Returns what is still begun.
    fn look(&self, layouts: &[GpuLayout]) -> Vec<Unfinished> {
        let mut made = self.on_demand.made();
        if let Err(error) = made.settle(layouts) {
            tracing::warn!(%error, "the list of MIG instances made here cannot be written");
        }
        made.unfinished().to_vec()
    }

    /// Carries out one step, and notes it before and after.
    fn carry_out(&mut self, nvml: &Nvml, step: &Step) -> Result<(), String> {
        let begun = self.on_demand.made().begin(step.begun.clone());
        begun.map_err(|error| {
            format!("the list of instances made here cannot be written (`--mig-folder`): {error}")
        })?;
        let began = self.clock.precise();
        let outcome = instances::carry_out(nvml, step);
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
                    error,
                    "cannot change a MIG instance"
                );
            }
        }
        match instances::layout_of(nvml, gpu, &mut self.profiles) {
            Ok(layout) => {
                if outcome.is_err() && step.begun.is_new {
                    self.on_demand.made().refused(&step.begun, &layout);
                }
                drop(self.look(&[layout]));
            }
            // The next round notes what became of it.
            Err(error) => tracing::warn!(%error, "MIG instances cannot be read"),
        }
        outcome
    }

    fn fail(&mut self, order: &Order, error: String, now: Timestamp) {
        self.attempts.fail(order, error, now);
        self.on_demand.note_failures(self.attempts.failures());
    }

    /// Keeps the failures of these orders alone, and shows them.
    fn settle(&mut self, open_orders: &BTreeSet<Order>) {
        self.attempts.keep(open_orders);
        self.on_demand.note_failures(self.attempts.failures());
    }

    /// Notes that nothing can be made or switched, because the library does not answer.
    fn fail_all(&mut self, orders: &MigOrders, error: &ProbeError) {
        let make = orders.make.iter().cloned().map(Order::to_make);
        let whole = orders.whole.iter().filter(|_| self.on_demand.switches_mode());
        let all: BTreeSet<Order> = make.chain(whole.map(|it| to_whole(&it.gpu))).collect();
        for order in &all {
            self.attempts.refuse(order.clone(), error.to_string());
        }
        self.settle(&all);
    }
}

/// Whether all orders to leave GPUs out of MIG mode are obeyed.
fn is_obeyed(orders: &MigOrders, obeyed: &ObeyedOrders) -> bool {
    let is_same = orders.term == obeyed.term || orders.whole.is_empty();
    is_same && orders.whole.iter().all(|it| obeyed.gpus.contains(it))
}
