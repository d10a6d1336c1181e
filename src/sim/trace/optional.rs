//! The optional columns of a trace: finds them, and checks their values.
//!
//! [`crate::sim::trace::dimensions`] has the forms of the values. An empty value says nothing, like
//! a column that is not there.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::str::FromStr;

use crate::hardware::device::{MAX_DEVICE_MEMORY, MAX_DEVICES_PER_NODE, MigProfile};
use crate::hardware::pool::{ConfiguredIsolation, Enforcement, InstanceUse, PoolRule, Replicas};
use crate::hardware::units::{Demand, MemMib, Share};
use crate::model::policy::Policy;
use crate::model::request::{Amount, Isolation, Limit};
use crate::sim::trace::dimensions::{
    DeviceAt, MoreOfNode, MoreOfPod, TraceInstance, TracePlacement, device_memory, held, milli_up,
    share,
};
use crate::sim::trace::inventory::RowOfNode;
use crate::sim::trace::table::{Column, Row, Table, TraceError};

/// Longest name of a MIG profile.
const PROFILE_BYTES_MAX: usize = 64;

/// The optional columns of a node file.
pub(crate) struct NodeColumns {
    memory: Option<Column>,
    models: Option<Column>,
    mig: Option<Column>,
    slots: Option<Column>,
    instances: Option<Column>,
    enforcement: Option<Column>,
    unavailable: Option<Column>,
    other_use: Option<Column>,
}

impl NodeColumns {
    /// Those of a table.
    pub(crate) fn find<R: Read>(table: &Table<'_, R>) -> Result<Self, TraceError> {
        Ok(Self {
            memory: table.find("gpu_memory_mib")?,
            models: table.find("gpu_models")?,
            mig: table.find("mig")?,
            slots: table.find("slots")?,
            instances: table.find("mig_instances")?,
            enforcement: table.find("enforcement")?,
            unavailable: table.find("unavailable")?,
            other_use: table.find("other_use_mib")?,
        })
    }

    /// What they say of a node with `gpus` GPUs; `None` if they say nothing.
    pub(crate) fn read(
        &self,
        row: &Row<'_>,
        (gpus, model): (u32, &str),
    ) -> Result<Option<Box<MoreOfNode>>, TraceError> {
        let mut more = MoreOfNode::default();
        if let Some((column, text)) = given(row, self.memory) {
            more.gpu_memory = gpu_memory(row, column, (gpus, text))?;
        }
        if let Some((column, text)) = given(row, self.models) {
            let parts = one_for_each(row, column, (gpus, text))?;
            let named = parts.into_iter().map(|part| row.check_model(column, part));
            more.gpu_models = named.collect::<Result<_, TraceError>>()?;
            if more.gpu_models.iter().all(|own| own == model) {
                more.gpu_models.clear();
            }
        }
        if let Some((column, text)) = given(row, self.mig) {
            let known = RowOfNode { gpus, model, more: Some(&more) };
            more.instances = instances(row, column, known, text)?;
        }
        more.rule = self.rule(row)?;
        let devices = devices_of(row, self.mig, RowOfNode { gpus, model, more: Some(&more) })?;
        if let Some((column, text)) = given(row, self.unavailable) {
            more.unavailable = unavailable(row, column, (text, &devices))?;
        }
        if let Some((column, text)) = given(row, self.other_use) {
            more.other_use = other_use(row, column, (text, &devices))?;
        }
        if more == MoreOfNode::default() {
            return Ok(None);
        }
        let is_new = RowOfNode { gpus, model, more: Some(&more) };
        self.check_inventory(row, is_new)?;
        Ok(Some(Box::new(more)))
    }

    fn rule(&self, row: &Row<'_>) -> Result<PoolRule, TraceError> {
        let mut rule = PoolRule::default();
        if let Some((column, _)) = given(row, self.slots) {
            rule.replicas = Replicas::new(row.number(column, Replicas::MIN..=Replicas::MAX)?);
        }
        if let Some((column, text)) = given(row, self.instances) {
            rule.instances = match text {
                "whole" => InstanceUse::Whole,
                "shared" => InstanceUse::Shared,
                _ => return row.refuse(column, "`whole` or `shared`"),
            };
        }
        if let Some((column, text)) = given(row, self.enforcement) {
            let all = [Enforcement::None, Enforcement::Mps, Enforcement::Driver];
            rule.enforcement = named(row, column, (text, &all), Enforcement::name)?;
        }
        Ok(rule)
    }

    /// Refuses what no node can have, so that the error names the line.
    fn check_inventory(&self, row: &Row<'_>, node: RowOfNode<'_>) -> Result<(), TraceError> {
        let column = self.mig.or(self.memory).or(self.models);
        let devices = node.devices(0);
        let inventory = devices.and_then(|devices| RowOfNode::inventory(&devices));
        let fault = match &inventory {
            Err(error) => error.to_string(),
            Ok(inventory) => {
                let faults = inventory.faults().iter();
                let mut unlisted = faults.filter(|(id, _)| {
                    let unavailable = node.more.map(|more| &more.unavailable);
                    let is_it = |at: &DeviceAt| id.as_str() == instance_id(*at);
                    !unavailable.is_some_and(|all| all.iter().any(is_it))
                });
                let Some((_, fault)) = unlisted.next() else { return Ok(()) };
                fault.to_string()
            }
        };
        let Some(column) = column else { return Ok(()) };
        row.refuse(column, format!("devices that a node can have: {fault}"))
    }
}

/// The UUID that [`RowOfNode::devices`] gives an instance of the node with rank 0.
fn instance_id(at: DeviceAt) -> String {
    format!("MIG-0000000-{:03}-{:03}", at.gpu, at.instance.unwrap_or(u32::MAX))
}

/// A value that is not empty, with its column.
fn given<'r>(row: &'r Row<'_>, column: Option<Column>) -> Option<(Column, &'r str)> {
    let column = column?;
    Some((column, row.text(column))).filter(|(_, text)| !text.is_empty())
}

fn named<T: Copy>(
    row: &Row<'_>,
    column: Column,
    (text, all): (&str, &[T]),
    name: fn(T) -> &'static str,
) -> Result<T, TraceError> {
    match all.iter().find(|one| name(**one) == text) {
        Some(one) => Ok(*one),
        None => {
            let names: Vec<String> = all.iter().map(|one| format!("`{}`", name(*one))).collect();
            row.refuse(column, names.join(", "))
        }
    }
}

/// The parts of a value between `|`, one for each GPU.
fn one_for_each<'t>(
    row: &Row<'_>,
    column: Column,
    (gpus, text): (u32, &'t str),
) -> Result<Vec<&'t str>, TraceError> {
    let count = text.split('|').count();
    if u32::try_from(count) != Ok(gpus) {
        return row.refuse(column, format!("{gpus} values between `|`, one for each GPU"));
    }
    Ok(text.split('|').map(str::trim).collect())
}

fn gpu_memory(
    row: &Row<'_>,
    column: Column,
    (gpus, text): (u32, &str),
) -> Result<Vec<MemMib>, TraceError> {
    let parts = match text.contains('|') {
        true => one_for_each(row, column, (gpus, text))?,
        false => vec![text],
    };
    let read = parts.into_iter().map(|part| device_memory(part, 1));
    let Ok(mut memory) = read.collect::<Result<Vec<MemMib>, _>>() else {
        let most = MAX_DEVICE_MEMORY.mib();
        let allowed = format!("MiB from 1 to {most}, one number for all GPUs or one for each");
        return row.refuse(column, allowed);
    };
    if gpus == 0 {
        return row.refuse(column, "nothing, for a node without GPUs");
    }
    if memory.iter().all(|own| *own == memory[0]) {
        memory.truncate(1);
    }
    Ok(memory)
}

fn instances(
    row: &Row<'_>,
    column: Column,
    node: RowOfNode<'_>,
    text: &str,
) -> Result<Vec<Vec<TraceInstance>>, TraceError> {
    let mut all = Vec::new();
    let mut count = position(node.gpus);
    for (gpu, of_gpu) in (0..).zip(one_for_each(row, column, (node.gpus, text))?) {
        let mut own = Vec::new();
        for text in of_gpu.split_whitespace() {
            count += 1;
            if count > MAX_DEVICES_PER_NODE {
                return row.refuse(column, format!("at most {MAX_DEVICES_PER_NODE} devices"));
            }
            let Some(instance) = instance((node, gpu), text) else {
                return row.refuse(
                    column,
                    "`profile:MiB` of each instance, such as `1g.10gb:9728`, with blanks between \
                     those of a GPU and `|` between GPUs; MiB may be left out for a listed model",
                );
            };
            own.push(instance);
        }
        all.push(own);
    }
    if all.iter().all(Vec::is_empty) {
        all.clear();
    }
    Ok(all)
}

fn instance((node, gpu): (RowOfNode<'_>, u32), text: &str) -> Option<TraceInstance> {
    let (name, memory) = text.split_once(':').map_or((text, None), |(a, b)| (a, Some(b)));
    let profile = profile(name)?;
    let memory = match memory {
        Some(memory) => device_memory(memory, 1).ok()?,
        None => node.memory_of_profile(gpu, &profile)?,
    };
    Some(TraceInstance { profile, memory })
}

/// The profile of that name.
pub(crate) fn profile(name: &str) -> Option<MigProfile> {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || b".+-_".contains(&byte);
    let is_legal = (1..=PROFILE_BYTES_MAX).contains(&name.len()) && name.bytes().all(legal);
    is_legal.then(|| MigProfile::new(name))
}

fn position(gpu: u32) -> usize {
    usize::try_from(gpu).unwrap_or(usize::MAX)
}

fn devices_of(
    row: &Row<'_>,
    column: Option<Column>,
    node: RowOfNode<'_>,
) -> Result<BTreeSet<DeviceAt>, TraceError> {
    match (node.devices(0), column) {
        (Ok(devices), _) => Ok(devices.into_iter().map(|it| it.at).collect()),
        (Err(error), Some(column)) => row.refuse(column, error),
        (Err(_), None) => Ok(BTreeSet::new()),
    }
}

fn unavailable(
    row: &Row<'_>,
    column: Column,
    (text, known): (&str, &BTreeSet<DeviceAt>),
) -> Result<BTreeSet<DeviceAt>, TraceError> {
    let parts = text.split('|').map(|part| DeviceAt::from_str(part.trim()));
    let read: Result<BTreeSet<DeviceAt>, _> = parts.collect();
    match read {
        Ok(devices) if devices.is_subset(known) => Ok(devices),
        _ => row.refuse(column, "devices of the node, such as `0|1.2`"),
    }
}

fn other_use(
    row: &Row<'_>,
    column: Column,
    (text, known): (&str, &BTreeSet<DeviceAt>),
) -> Result<BTreeMap<DeviceAt, MemMib>, TraceError> {
    let mut all = BTreeMap::new();
    for part in text.split('|') {
        let parsed = part.trim().split_once(':').and_then(|(device, memory)| {
            let device: DeviceAt = device.parse().ok()?;
            let memory = device_memory(memory, 1).ok()?;
            known.contains(&device).then_some((device, memory))
        });
        let is_new = parsed.is_some_and(|(device, memory)| all.insert(device, memory).is_none());
        if !is_new {
            return row.refuse(column, "`device:MiB` of different devices, such as `0:512|1.2:64`");
        }
    }
    Ok(all)
}

/// The optional columns of a pod file.
pub(crate) struct PodColumns {
    milli: Column,
    memory: Option<Column>,
    profile: Option<Column>,
    slots: Option<Column>,
    isolation: Option<Column>,
    limit: Option<Column>,
    memory_limit: Option<Column>,
    policy: Option<Column>,
    min_memory: Option<Column>,
    by_instance: Option<Column>,
    priority: Option<Column>,
    node: Option<Column>,
    devices: Option<Column>,
    placed_isolation: Option<Column>,
}

/// What a pod requests of each GPU.
pub(crate) struct ReadPod {
    pub(crate) gpu_milli: u32,
    pub(crate) more: Option<Box<MoreOfPod>>,
}

impl PodColumns {
    /// Those of a table.
    pub(crate) fn find<R: Read>(table: &Table<'_, R>) -> Result<Self, TraceError> {
        Ok(Self {
            milli: table.require("gpu_milli")?,
            memory: table.find("gpu_memory_mib")?,
            profile: table.find("mig_profile")?,
            slots: table.find("gpu_slots")?,
            isolation: table.find("isolation")?,
            limit: table.find("limit_milli")?,
            memory_limit: table.find("limit_gpu_memory_mib")?,
            policy: table.find("policy")?,
            min_memory: table.find("min_gpu_memory_mib")?,
            by_instance: table.find("by_instance")?,
            priority: table.find("priority")?,
            node: table.find("node")?,
            devices: table.find("devices")?,
            placed_isolation: table.find("placed_isolation")?,
        })
    }

    /// What they say of a pod with `num_gpu` GPUs.
    pub(crate) fn read(&self, row: &Row<'_>, num_gpu: u32) -> Result<ReadPod, TraceError> {
        let mut more = MoreOfPod::default();
        let gpu_milli = if num_gpu == 0 {
            self.refuse_gpu_columns(row)?;
            row.number(self.milli, 0..=0)?
        } else {
            let (gpu_milli, amount) = self.amount(row, num_gpu)?;
            more.amount = amount;
            more.limit = self.limit(row, (gpu_milli, &more))?;
            more.isolation = self.isolation(row)?;
            more.policy = match given(row, self.policy) {
                Some((column, text)) => {
                    Some(named(row, column, (text, &Policy::ALL), Policy::name)?)
                }
                None => None,
            };
            more.min_memory = self.memory_in(row, self.min_memory)?.unwrap_or(MemMib::ZERO);
            more.by_instance = match given(row, self.by_instance) {
                None | Some((_, "false")) => false,
                Some((_, "true")) => true,
                Some((column, _)) => return row.refuse(column, "`true` or `false`"),
            };
            gpu_milli
        };
        if let Some((column, text)) = given(row, self.priority) {
            let digits = text.strip_prefix('-').unwrap_or(text);
            let are_digits = digits.bytes().all(|byte| byte.is_ascii_digit());
            more.priority = match text.parse() {
                Ok(priority) if are_digits => priority,
                _ => return row.refuse(column, "a whole number of 32 bits"),
            };
        }
        more.placed = self.placed(row)?;
        let more = (more != MoreOfPod::default()).then(|| Box::new(more));
        Ok(ReadPod { gpu_milli, more })
    }

    /// A pod without a GPU that qualifies one is a mistake.
    fn refuse_gpu_columns(&self, row: &Row<'_>) -> Result<(), TraceError> {
        let of_gpus = [
            self.memory,
            self.profile,
            self.slots,
            self.isolation,
            self.limit,
            self.memory_limit,
            self.policy,
            self.min_memory,
            self.by_instance,
            self.devices,
            self.placed_isolation,
        ];
        let is_odd = |text: &str| !matches!(text, "0" | "none" | "false");
        match of_gpus.into_iter().find_map(|it| given(row, it).filter(|(_, text)| is_odd(text))) {
            Some((column, _)) => row.refuse(column, "nothing, as `num_gpu` is 0"),
            None => Ok(()),
        }
    }

    /// The share in thousandths, rounded up, and the amount if that does not say all.
    fn amount(&self, row: &Row<'_>, num_gpu: u32) -> Result<(u32, Option<Amount>), TraceError> {
        let memory = self.memory_in(row, self.memory)?;
        let (profile, slots) = (given(row, self.profile), given(row, self.slots));
        let slots = slots.filter(|(_, text)| *text != "0");
        let is_other = memory.is_some() || profile.is_some() || slots.is_some();
        let text = row.text(self.milli);
        let share = match share(if text.is_empty() && is_other { "0" } else { text }) {
            Ok(share) if share > Share::ZERO || is_other => share,
            _ => {
                return row.refuse(
                    self.milli,
                    "thousandths above 0 up to 1000, with at most three decimals",
                );
            }
        };
        let milli = milli_up(share);
        if let Some((column, text)) = profile {
            let wanted = self::profile(text);
            if memory.is_some() || slots.is_some() || ![0, 1000].contains(&milli) {
                return row.refuse(column, "a profile and no `gpu_memory_mib`, slot or share");
            }
            return match wanted {
                Some(profile) => Ok((1000, Some(Amount::MigInstance(profile)))),
                None => row.refuse(column, "the name of a MIG profile, such as `3g.40gb`"),
            };
        }
        if let Some((column, text)) = slots {
            let is_alone = memory.is_none() && share == Share::ZERO && num_gpu == 1;
            return match text {
                "1" if is_alone => Ok((0, Some(Amount::SharedSlot))),
                _ => row.refuse(column, "`1`, with `num_gpu` 1 and without share and memory"),
            };
        }
        Ok(match memory {
            Some(memory) if share == Share::ZERO => (0, Some(Amount::Memory(memory))),
            Some(memory) => (milli, Some(Amount::FractionAndMemory(share, memory))),
            None if share.millionths().is_multiple_of(1000) => (milli, None),
            None => (milli, Some(Amount::Fraction(share))),
        })
    }

    /// Memory of a device; an empty value or `0` is none.
    fn memory_in(
        &self,
        row: &Row<'_>,
        column: Option<Column>,
    ) -> Result<Option<MemMib>, TraceError> {
        let Some((column, text)) = given(row, column) else { return Ok(None) };
        match device_memory(text, 0) {
            Ok(memory) => Ok(Some(memory).filter(|memory| *memory > MemMib::ZERO)),
            Err(_) => row.refuse(column, format!("MiB from 0 to {}", MAX_DEVICE_MEMORY.mib())),
        }
    }

    fn limit(
        &self,
        row: &Row<'_>,
        (gpu_milli, more): (u32, &MoreOfPod),
    ) -> Result<Option<Limit>, TraceError> {
        let whole_milli = Share::from_millionths(u64::from(gpu_milli) * 1000);
        let (requested, memory) = match &more.amount {
            None => (Some(whole_milli), None),
            Some(Amount::Fraction(share)) => (Some(*share), None),
            Some(Amount::Memory(memory)) => (None, Some(*memory)),
            Some(Amount::FractionAndMemory(share, memory)) => (Some(*share), Some(*memory)),
            Some(Amount::Whole | Amount::MigInstance(_) | Amount::SharedSlot) => (None, None),
        };
        let of_memory = given(row, self.memory_limit);
        if let Some((column, text)) = given(row, self.limit) {
            if of_memory.is_some() {
                return row.refuse(column, "nothing beside `limit_gpu_memory_mib`");
            }
            return match (share(text), requested) {
                (Ok(limit), Some(requested)) if limit >= requested => {
                    Ok(Some(Limit::Fraction(limit)))
                }
                _ => row.refuse(column, "thousandths from the requested share to 1000"),
            };
        }
        let Some((column, text)) = of_memory else { return Ok(None) };
        match (device_memory(text, 1), memory) {
            (Ok(limit), Some(memory)) if limit >= memory => Ok(Some(Limit::Memory(limit))),
            _ => row.refuse(column, "MiB, at least the requested `gpu_memory_mib`"),
        }
    }

    fn isolation(&self, row: &Row<'_>) -> Result<Isolation, TraceError> {
        match given(row, self.isolation) {
            Some((column, text)) => named(row, column, (text, &Isolation::ALL), Isolation::name),
            None => Ok(Isolation::None),
        }
    }

    fn placed(&self, row: &Row<'_>) -> Result<Option<TracePlacement>, TraceError> {
        let devices = given(row, self.devices);
        let placed_isolation = given(row, self.placed_isolation);
        let Some((column, node)) = given(row, self.node) else {
            return match devices.or(placed_isolation) {
                Some((column, _)) => row.refuse(column, "nothing without a `node`"),
                None => Ok(None),
            };
        };
        let node = row.check_model(column, node)?;
        let devices = match devices {
            Some((column, text)) => placed_devices(row, column, text)?,
            None => Vec::new(),
        };
        let isolation = match placed_isolation {
            Some((column, text)) => {
                let all = [
                    ConfiguredIsolation::None,
                    ConfiguredIsolation::Mps,
                    ConfiguredIsolation::Driver,
                    ConfiguredIsolation::Hardware,
                ];
                named(row, column, (text, &all), ConfiguredIsolation::name)?
            }
            None => ConfiguredIsolation::None,
        };
        Ok(Some(TracePlacement { node, devices, isolation }))
    }
}

fn placed_devices(
    row: &Row<'_>,
    column: Column,
    text: &str,
) -> Result<Vec<(DeviceAt, Demand)>, TraceError> {
    let mut devices = Vec::new();
    let mut named = BTreeSet::new();
    for part in text.split('|') {
        match held(part.trim()) {
            Ok(one) if devices.len() < MAX_DEVICES_PER_NODE && named.insert(one.0) => {
                devices.push(one);
            }
            _ => {
                return row.refuse(
                    column,
                    "`device:MiB:thousandths` of different devices, such as `0:4096:250|1.2:9728:1000`",
                );
            }
        }
    }
    Ok(devices)
}
