//! What a GPU pod may set besides its GPU: what the Pod Security standard *baseline* allows
//! (Kubernetes 1.36), and what the operator adds. These are lists of allowed values: a value that a
//! newer Kubernetes adds is refused until it is listed here.
//!
//! <https://kubernetes.io/docs/concepts/security/pod-security-standards/#baseline>

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    AppArmorProfile, PodSpec, SELinuxOptions, SeccompProfile, SecurityContext, Volume,
    WindowsSecurityContextOptions,
};

use crate::config::webhook::WebhookConfig;
use crate::containers::admission_error::AdmissionError;
use crate::containers::container_view::ContainerView;
use crate::request::request_error::shown;

const CAPABILITIES: [&str; 13] = [
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
];

const SYSCTLS: [&str; 12] = [
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
];

const SELINUX_TYPES: [&str; 5] =
    ["", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"];

/// Types of AppArmor and seccomp profiles that confine.
const PROFILES: [&str; 2] = ["RuntimeDefault", "Localhost"];

/// The older form of an AppArmor profile: an annotation for each container.
const APPARMOR_ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";

/// Keys of the configuration that allow more, for messages.
const HOST_NETWORK_KEY: Option<&str> = Some("webhook.allow_host_network");
const SYSCTLS_KEY: Option<&str> = Some("webhook.allowed_sysctls");
const CAPABILITIES_KEY: Option<&str> = Some("webhook.allowed_capabilities");

/// Refuses what a whole pod sets beyond *baseline*, but not the volume `ours`: gpupack adds it.
///
/// # Errors
/// The first [`AdmissionError`] found.
pub(crate) fn check_pod(
    annotations: &BTreeMap<String, String>,
    spec: &PodSpec,
    settings: &WebhookConfig,
    ours: Option<&Volume>,
) -> Result<(), AdmissionError> {
    if !settings.allow_host_network && spec.host_network == Some(true) {
        return Err(not_allowed(None, "hostNetwork", "true", HOST_NETWORK_KEY));
    }
    for volume in spec.volumes.iter().flatten().filter(|volume| Some(*volume) != ours) {
        let Some(source) = &volume.host_path else { continue };
        if !settings.allowed_host_paths.iter().any(|folder| folder.is_at(&source.path)) {
            let (volume, path) = (shown(&volume.name), shown(&source.path));
            return Err(AdmissionError::UnlistedHostPath { volume, path });
        }
    }
    let mut profiles = annotations.iter().filter(|(key, _)| key.starts_with(APPARMOR_ANNOTATION));
    if let Some((_, value)) = profiles.find(|(_, value)| !confines(value)) {
        return Err(not_allowed(None, APPARMOR_ANNOTATION, value, None));
    }
    let Some(security) = &spec.security_context else { return Ok(()) };
    check_profiles(
        None,
        security.app_armor_profile.as_ref(),
        security.seccomp_profile.as_ref(),
        security.se_linux_options.as_ref(),
        security.windows_options.as_ref(),
    )?;
    let is_safe = |name: &str| {
        SYSCTLS.contains(&name) || settings.allowed_sysctls.iter().any(|listed| listed == name)
    };
    match security.sysctls.iter().flatten().find(|sysctl| !is_safe(&sysctl.name)) {
        Some(sysctl) => {
            Err(not_allowed(None, "securityContext.sysctls", &sysctl.name, SYSCTLS_KEY))
        }
        None => Ok(()),
    }
}

/// Whether an AppArmor profile in an annotation confines.
fn confines(profile: &str) -> bool {
    profile.is_empty() || profile == "runtime/default" || profile.starts_with("localhost/")
}

/// Refuses what a container sets beyond *baseline*.
///
/// # Errors
/// The first [`AdmissionError`] found.
pub(crate) fn check_container(
    container: &ContainerView<'_>,
    settings: &WebhookConfig,
) -> Result<(), AdmissionError> {
    let name = Some(container.name);
    let port = container.ports.iter().filter_map(|port| port.host_port).find(|port| *port != 0);
    if let Some(port) = port.filter(|_| !settings.allow_host_network) {
        return Err(not_allowed(name, "hostPort", &port.to_string(), HOST_NETWORK_KEY));
    }
    if let Some(host) = hosts(container).find(|host| !host.is_empty()) {
        return Err(not_allowed(name, "host", host, None));
    }
    let Some(security) = container.security else { return Ok(()) };
    check_profiles(
        name,
        security.app_armor_profile.as_ref(),
        security.seccomp_profile.as_ref(),
        security.se_linux_options.as_ref(),
        security.windows_options.as_ref(),
    )?;
    if let Some(mount) = security.proc_mount.as_deref().filter(|mount| *mount != "Default") {
        return Err(not_allowed(name, "securityContext.procMount", mount, None));
    }
    match unlisted_capability(security, settings) {
        Some(capability) => {
            let field = "securityContext.capabilities.add";
            Err(not_allowed(name, field, capability, CAPABILITIES_KEY))
        }
        None => Ok(()),
    }
}

/// The first added capability that neither *baseline* nor the operator allows.
fn unlisted_capability<'a>(
    security: &'a SecurityContext,
    settings: &WebhookConfig,
) -> Option<&'a str> {
    let added = security.capabilities.as_ref()?.add.as_ref()?;
    let is_allowed = |given: &&String| {
        let name = given.strip_prefix("CAP_").unwrap_or(given);
        CAPABILITIES.contains(&name)
            || settings.allowed_capabilities.iter().any(|listed| listed == name)
    };
    added.iter().find(|given| !is_allowed(given)).map(String::as_str)
}

/// Refuses profiles that do not confine, SELinux labels that relax its rules, and processes of a
/// Windows host, of a container, or of the pod if `None`.
fn check_profiles(
    container: Option<&str>,
    app_armor: Option<&AppArmorProfile>,
    seccomp: Option<&SeccompProfile>,
    labels: Option<&SELinuxOptions>,
    windows: Option<&WindowsSecurityContextOptions>,
) -> Result<(), AdmissionError> {
    for (field, kind) in [
        ("securityContext.appArmorProfile.type", app_armor.map(|profile| profile.type_.as_str())),
        ("securityContext.seccompProfile.type", seccomp.map(|profile| profile.type_.as_str())),
    ] {
        if let Some(kind) = kind.filter(|kind| !PROFILES.contains(kind)) {
            return Err(not_allowed(container, field, kind, None));
        }
    }
    if let Some(labels) = labels {
        let kind = labels.type_.as_deref().unwrap_or_default();
        if !SELINUX_TYPES.contains(&kind) {
            return Err(not_allowed(container, "securityContext.seLinuxOptions.type", kind, None));
        }
        for (field, value) in [
            ("securityContext.seLinuxOptions.user", labels.user.as_deref()),
            ("securityContext.seLinuxOptions.role", labels.role.as_deref()),
        ] {
            if let Some(value) = value.filter(|value| !value.is_empty()) {
                return Err(not_allowed(container, field, value, None));
            }
        }
    }
    if windows.is_some_and(|windows| windows.host_process == Some(true)) {
        let field = "securityContext.windowsOptions.hostProcess";
        return Err(not_allowed(container, field, "true", None));
    }
    Ok(())
}

/// Hosts that kubelet calls for the container, in probes and hooks.
fn hosts<'a>(container: &ContainerView<'a>) -> impl Iterator<Item = &'a str> {
    let probes = container.probes.into_iter().flatten();
    let probed = probes.map(|probe| (probe.http_get.as_ref(), probe.tcp_socket.as_ref()));
    let hooks = container.lifecycle.into_iter();
    let hooks = hooks.flat_map(|hooks| [hooks.post_start.as_ref(), hooks.pre_stop.as_ref()]);
    let hooked = hooks.flatten().map(|hook| (hook.http_get.as_ref(), hook.tcp_socket.as_ref()));
    probed.chain(hooked).flat_map(|(http, tcp)| {
        let http = http.and_then(|http| http.host.as_deref());
        [http, tcp.and_then(|tcp| tcp.host.as_deref())].into_iter().flatten()
    })
}

fn not_allowed(
    container: Option<&str>,
    field: &'static str,
    value: &str,
    key: Option<&'static str>,
) -> AdmissionError {
    let place = match container {
        Some(container) => format!("container `{}`", shown(container)),
        None => "the pod".to_owned(),
    };
    AdmissionError::NotAllowed { place, field, value: shown(value), key }
}
