//! Keys, flags and commands of the version before that this one no longer has, with what to do instead. Kept for this version
//! alone.

use serde_yaml_ng::{Mapping, Value};

/// A key, flag or command that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone {
    /// Its path in the file, with `*` for a name; or the words of the command line.
    pub name: &'static str,
    /// The value that is gone; `None`: the whole key.
    pub value: Option<&'static str>,
    pub advice: &'static str,
}

const fn gone(name: &'static str, value: Option<&'static str>, advice: &'static str) -> Gone {
    Gone { name, value, advice }
}

/// The keys of the configuration.
pub const KEYS: &[Gone] = &[
    gone(
        "pools.*.mig",
        Some("by_turns"),
        "GPUs keep their MIG mode; say `on_demand`, and switch the mode of whole GPUs by the MIG Manager",
    ),
    gone(
        "pools.*.soft_limits",
        None,
        "leave it out; with `webhook.memory_limit: driver` lent memory is split by the driver's limits",
    ),
    gone(
        "pools.*.respread_idle_seconds",
        None,
        "leave it out; pods are moved home, or for memory that others need, and not while they use no GPU",
    ),
    gone(
        "pools.*.mig_moves",
        None,
        "leave it out; `/v1/moves` and `gpupack explain` name the pods whose move would help",
    ),
    gone("pools.*.spread_empty", None, "leave it out; pools that lend always do this"),
    gone(
        "webhook.mps_thread_percentage",
        Some("share_even_on_hopper"),
        "say `share`, which limits no compute on Hopper GPUs: products were incomplete there",
    ),
    gone(
        "certificates.ca_seconds",
        None,
        "leave it out; a new CA lasts ten years, one that is there ends as it was set to, see docs/install.md#replace-the-ca",
    ),
    gone(
        "certificates.spread_seconds",
        None,
        "leave it out; a CA is replaced by a command, see docs/install.md#replace-the-ca",
    ),
    gone(
        "domain_label",
        None,
        "leave it out; failure domains are those of `topology.kubernetes.io/zone`",
    ),
    gone("max_connections", None, "leave it out; agents may have 8,192 connections"),
    gone("max_in_flight_mib", None, "leave it out; it is 64 MiB, or twice `max_body_mib`"),
    gone(
        "log_level_endpoint",
        None,
        "leave it out; the loopback interface alone may change the log level",
    ),
    gone("warm_up_seconds", None, "leave it out; answers wait 10 s at most"),
    gone("group_timeout_seconds", None, "leave it out; room for a group is kept for 60 s"),
    gone("unmanaged_tolerance_mib", None, "leave it out; it is 128 MiB"),
    gone("preemption.at_once", None, "leave it out; room is made for 8 pods at a time"),
    gone("guard.after_samples", None, "leave it out; two lists of processes must show the excess"),
    gone("guard.grace_seconds", None, "leave it out; pods have 30 s"),
    gone("advice.look_back_hours", None, "leave it out; the last 24 hours are read"),
    gone(
        "tls.scheduler_name",
        None,
        "leave it out; kube-scheduler's certificate needs the name `gpupack-scheduler`",
    ),
    gone(
        "tls.replica_name",
        None,
        "leave it out; the extender's certificate needs the name `gpupack-extender`",
    ),
    gone("agents.audience", None, "leave it out; tokens of agents are for `gpupack`"),
    gone(
        "agents.service_account",
        None,
        "leave it out; agents have the ServiceAccount `gpupack-agent`",
    ),
    gone("recall_seconds", None, "leave it out; bind waits 8 s at most"),
    gone(
        "api_timeout_seconds",
        None,
        "leave it out; it is 5 s, and at most half of `scheduler_timeout_seconds`",
    ),
    gone("guard.tolerance_mib", None, "leave it out; it is 128 MiB"),
    gone("lease.name", None, "leave it out; the Lease is `gpupack`"),
];

/// What only papers need.
const LAB: &str = "gpupack-lab has it, see docs/simulator.md#gpupack-lab";

/// Commands, their flags, and values of these; `*` is any end. Those of the agent are in its crate.
pub const WORDS: &[Gone] = &[
    gone(
        "demo --report-rate",
        None,
        "leave it out; simulated agents send 500 reports a second at most",
    ),
    gone("extender --listen", None, "set `listen` in the file of `--config`"),
    gone("extender --page-listen", None, "set `page_listen` in the file of `--config`"),
    gone("extender --agents-listen", None, "set `agents_listen` in the file of `--config`"),
    gone("extender --metrics-listen", None, "set `metrics_listen` in the file of `--config`"),
    gone("extender --kubeconfig", None, "set `kubeconfig` in the file of `--config`"),
    gone("simulate --chart", None, "say `--charts` with a folder"),
    gone("simulate --bursts", None, LAB),
    gone("simulate --mig", None, LAB),
    gone("simulate --mig-churn", None, LAB),
    gone("simulate --mig-turns", None, "leave it out; GPUs keep their MIG mode"),
    gone("simulate --gpus", None, LAB),
    gone("simulate --stress", None, LAB),
    gone("simulate --world", None, LAB),
    gone("simulate --bound", None, LAB),
    gone("simulate --policy random", None, LAB),
    gone("simulate --policy dotprod", None, LAB),
    gone("simulate --policy gpuclustering", None, LAB),
    gone("simulate --policy gpupacking", None, LAB),
    gone("simulate --policy known-mix", None, LAB),
    gone("simulate --policy without-*", None, LAB),
    gone(
        "webhook-cert",
        None,
        "the extender, Helm or cert-manager make the certificate, or openssl, see docs/admission.md#install",
    ),
];

/// Takes what is gone out of a document, and says so of each.
pub(crate) fn take(document: &mut Mapping) -> Vec<String> {
    let mut faults = Vec::new();
    for gone in KEYS {
        let keys: Vec<&str> = gone.name.split('.').collect();
        take_at(document, &keys, &mut Vec::new(), *gone, &mut faults);
    }
    faults
}

fn take_at(
    section: &mut Mapping,
    keys: &[&str],
    path: &mut Vec<String>,
    gone: Gone,
    faults: &mut Vec<String>,
) {
    let [first, rest @ ..] = keys else { return };
    let names: Vec<String> = match *first {
        "*" => section.keys().filter_map(Value::as_str).map(str::to_owned).collect(),
        name => vec![name.to_owned()],
    };
    for name in names {
        path.push(name.clone());
        if !rest.is_empty() {
            if let Some(below) = section.get_mut(&name).and_then(Value::as_mapping_mut) {
                take_at(below, rest, path, gone, faults);
            }
        } else if let Some(found) = section.get(&name).filter(|found| is_meant(gone, found)) {
            // The chart drops a value by `null`, and says nothing of it.
            if !found.is_null() {
                faults.push(sentence(&path.join("."), gone));
            }
            section.remove(&name);
        }
        path.pop();
    }
}

fn is_meant(gone: Gone, found: &Value) -> bool {
    gone.value.is_none_or(|value| found.as_str() == Some(value))
}

/// What is said of something that somebody still sets.
fn sentence(path: &str, gone: Gone) -> String {
    let value = gone.value.map(|value| format!(": {value}")).unwrap_or_default();
    format!("`{}{value}` is gone: {}", path.escape_debug(), gone.advice)
}

/// What to say of a command, with one of its flags and a value, that is not known, if it is gone.
pub fn words(words: &str) -> Option<String> {
    let gone = WORDS.iter().find(|gone| match gone.name.strip_suffix('*') {
        Some(start) => words.starts_with(start),
        None => words == gone.name,
    });
    Some(sentence(words, *gone?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::Config;

    #[test]
    fn each_key_that_is_gone_is_refused_with_what_to_do() {
        for gone in KEYS {
            let keys: Vec<&str> = gone.name.split('.').collect();
            let value = Value::from(gone.value.unwrap_or("true"));
            let document = keys.iter().rev().fold(value, |below, key| {
                let key = if *key == "*" { "any" } else { key };
                Value::Mapping(Mapping::from_iter([(Value::from(key), below)]))
            });
            let tls = if gone.name.starts_with("certificates.") { "tls: {}\n" } else { "" };
            let text = format!("{tls}{}", serde_yaml_ng::to_string(&document).unwrap());
            let faults = Config::from_yaml(&text).unwrap_err().faults;
            assert_eq!(faults, [sentence(&gone.name.replace('*', "any"), *gone)], "{text}");
        }
    }

    #[test]
    fn advice_about_certificates_says_how_a_ca_is_replaced_that_is_there() {
        let of_certificates = KEYS.iter().filter(|gone| gone.name.starts_with("certificates."));
        for gone in of_certificates {
            assert!(gone.advice.ends_with("see docs/install.md#replace-the-ca"), "{gone:?}");
        }
    }

    #[test]
    fn a_key_without_a_value_is_left_out() {
        let text = "certificates: { ca_seconds: null }\ntls: {}\nwarm_up_seconds:\n";
        assert_eq!(Config::from_yaml(text), Config::from_yaml("certificates: {}\ntls: {}\n"));
    }

    #[test]
    fn what_is_gone_of_a_command_says_what_to_do_and_what_it_never_had_is_not_gone() {
        for gone in WORDS {
            let said = words(gone.name).unwrap();
            assert!(said.ends_with(gone.advice) && said.contains(gone.name), "{said}");
        }
        assert!(words("simulate --policy without-doubt").unwrap().contains("without-doubt"));
        for never in ["agent --mig-adopt", "demo --page-listen", "extender", "--listen", ""] {
            assert_eq!(words(never), None);
        }
    }
}
