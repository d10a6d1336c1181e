//! Which GPUs are to be switched to or from MIG mode: orders and present state in, calls out. Pure.
//!
//! A GPU is switched if it is empty only. Whether a process uses it is looked at when the switch is made.

use std::collections::BTreeSet;

use crate::agent::mig::plan::{GpuLayout, Layouts, Order};
use crate::hardware::spots::WHOLE;
use crate::mutation::{Mutation, mutated};
use crate::report::wire::{MakeInstance, MigOrders, ObeyedOrders};

/// A change of the mode of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Switch {
    /// UUID of the GPU.
    pub gpu: String,
    /// Whether it is to be in MIG mode.
    pub to_mig: bool,
    /// The orders for which it is made.
    pub orders: Vec<Order>,
}

/// Switches, and orders that need one that cannot be made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Switches {
    /// What to do.
    pub steps: Vec<Switch>,
    /// What is in the way of the other orders.
    pub failures: Vec<(Order, String)>,
}

/// The order to take a GPU out of MIG mode.
pub fn to_whole(gpu: &str) -> Order {
    Order::to_make(MakeInstance { gpu: gpu.to_owned(), profile: WHOLE.to_owned(), start: 0 })
}

/// The switches that the orders need. `of_kubelet` are the devices that kubelet hands out: none of these is
/// switched. `None`: they are not known yet.
pub fn switches(
    orders: &MigOrders,
    layouts: &Layouts,
    of_kubelet: Option<&BTreeSet<String>>,
) -> Switches {
    let mut all = Switches::default();
    for gpu in &layouts.gpus {
        let is_whole = orders.whole.iter().any(|it| it.gpu == gpu.uuid);
        let is_whole = is_whole && !mutated(Mutation::ModeOrderIgnored);
        let makes = orders.make.iter().filter(|it| it.gpu == gpu.uuid);
        let is_mig = gpu.is_in_mig_mode || gpu.is_mig_pending;
        let for_it = match (gpu.is_in_mig_mode, is_whole) {
            (_, true) if is_mig => vec![to_whole(&gpu.uuid)],
            (false, false) => makes.cloned().map(Order::to_make).collect(),
            (true, false) | (_, true) => continue,
        };
        match hindrance(gpu, of_kubelet) {
            Some(error) => all.failures.extend(for_it.into_iter().map(|it| (it, error.clone()))),
            None if for_it.is_empty() => {}
            None => {
                all.steps.push(Switch { gpu: gpu.uuid.clone(), to_mig: !is_whole, orders: for_it })
            }
        }
    }
    for it in &orders.whole {
        if let Some(error) = layouts.unread.get(&it.gpu) {
            all.failures.push((to_whole(&it.gpu), error.clone()));
        }
    }
    all
}

/// What is in the way of a switch of this GPU.
fn hindrance(gpu: &GpuLayout, of_kubelet: Option<&BTreeSet<String>>) -> Option<String> {
    let Some(of_kubelet) = of_kubelet else {
        return Some("kubelet has not said yet which devices it hands out".to_owned());
    };
    if of_kubelet.contains(&gpu.uuid) {
        return Some("kubelet hands out this GPU through a device plugin".to_owned());
    }
    let instance = gpu.instances.first()?;
    let of_whom = instance.devices.first().map_or("without compute instance", String::as_str);
    Some(format!("instance `{of_whom}` at unit {} is still there", instance.slot.start))
}

/// Which of the orders to leave GPUs out of MIG mode are obeyed now.
pub fn obeyed(orders: &MigOrders, layouts: &Layouts) -> ObeyedOrders {
    let is_whole = |uuid: &str| {
        let gpu = layouts.gpus.iter().find(|it| it.uuid == uuid);
        gpu.is_some_and(|it| !it.is_in_mig_mode && !it.is_mig_pending)
    };
    let gpus = orders.whole.iter().filter(|it| is_whole(&it.gpu)).cloned().collect();
    ObeyedOrders { term: orders.term, gpus }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::mig::plan::{GpuInstance, Units};
    use crate::report::wire::NumberedGpu;

    /// Two GPUs: `GPU-a` in MIG mode if it is said so, with as many instances.
    fn layouts(is_in_mig_mode: bool, instances: u32) -> Layouts {
        let instance = |start| GpuInstance {
            id: start,
            profile: 19,
            slot: Units { start, size: 1 },
            devices: vec![format!("MIG-{start}")],
        };
        let gpu = GpuLayout {
            uuid: "GPU-a".to_owned(),
            is_in_mig_mode,
            is_mig_pending: is_in_mig_mode,
            profiles: Vec::new(),
            instances: (0..instances).map(instance).collect(),
        };
        Layouts { gpus: vec![gpu], unread: [("GPU-b".to_owned(), "lost".to_owned())].into() }
    }

    fn orders(make: bool, whole: &[&str]) -> MigOrders {
        let place =
            MakeInstance { gpu: "GPU-a".to_owned(), profile: "1g.10gb".to_owned(), start: 2 };
        let whole = whole.iter().map(|gpu| NumberedGpu { gpu: (*gpu).to_owned(), number: 7 });
        let make = if make { vec![place] } else { Vec::new() };
        MigOrders { term: 3, make, whole: whole.collect(), ..MigOrders::default() }
    }

    /// The GPUs to switch, each with its new mode, and what is in the way.
    fn planned(
        orders: &MigOrders,
        layouts: &Layouts,
        kubelets: &[&str],
    ) -> (Vec<bool>, Vec<String>) {
        let kubelets = kubelets.iter().map(|it| (*it).to_owned()).collect();
        let Switches { steps, failures } = switches(orders, layouts, Some(&kubelets));
        let steps = steps.iter().map(|it| it.to_mig).collect();
        (steps, failures.into_iter().map(|(_, error)| error).collect())
    }

    #[test]
    fn an_empty_gpu_is_switched_as_it_is_ordered() {
        for (is_in_mig_mode, make, whole, switched) in [
            (false, true, false, vec![true]),
            (false, true, true, vec![]), // it is to stay out of it
            (false, false, false, vec![]),
            (false, false, true, vec![]),
            (true, true, false, vec![]),
            (true, false, false, vec![]), // an empty GPU keeps its mode
            (true, false, true, vec![false]),
        ] {
            let whole: &[&str] = if whole { &["GPU-a"] } else { &[] };
            let found = planned(&orders(make, whole), &layouts(is_in_mig_mode, 0), &[]);
            assert_eq!(found, (switched, vec![]), "{is_in_mig_mode} {make} {whole:?}");
        }
    }

    #[test]
    fn what_is_in_the_way_is_named() {
        let whole = orders(false, &["GPU-a", "GPU-b"]);
        let (steps, errors) = planned(&whole, &layouts(true, 1), &[]);
        assert!(steps.is_empty());
        assert_eq!(errors, ["instance `MIG-0` at unit 0 is still there", "lost"]);
        let (steps, errors) = planned(&orders(true, &[]), &layouts(false, 0), &["GPU-a"]);
        assert!(steps.is_empty());
        assert_eq!(errors, ["kubelet hands out this GPU through a device plugin"]);
        let unknown = switches(&orders(true, &[]), &layouts(false, 0), None);
        assert!(unknown.steps.is_empty() && unknown.failures.len() == 1);
    }

    #[test]
    fn an_order_is_obeyed_once_the_gpu_is_out_of_mig_mode() {
        let whole = orders(false, &["GPU-a", "GPU-b"]);
        assert_eq!(obeyed(&whole, &layouts(true, 0)), ObeyedOrders { term: 3, gpus: vec![] });
        let gpus = vec![NumberedGpu { gpu: "GPU-a".to_owned(), number: 7 }];
        assert_eq!(obeyed(&whole, &layouts(false, 0)), ObeyedOrders { term: 3, gpus });
        // A reset would turn it on: that is to be undone first.
        let mut pending = layouts(false, 0);
        pending.gpus[0].is_mig_pending = true;
        assert_eq!(obeyed(&whole, &pending).gpus, []);
        assert_eq!(planned(&whole, &pending, &[]).0, [false]);
    }
}
