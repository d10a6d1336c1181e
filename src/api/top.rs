//! What `gpupack top --output json` prints: parts of `/v1/state` as lists.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::kind::{ApiVersion, DeviceListKind, NodeListKind, TenantListKind};
use crate::api::state::{Device, Node, NodeReporting, Tenant};

/// `gpupack top nodes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeList {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `NodeList`.
    pub kind: NodeListKind,
    /// The nodes.
    pub items: Vec<Node>,
}

/// `gpupack top gpus`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeviceList {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `DeviceList`.
    pub kind: DeviceListKind,
    /// The devices.
    pub items: Vec<DeviceItem>,
}

/// A device with its node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DeviceItem {
    /// Name of its node.
    pub node: String,
    /// Whether the agent of its node reports.
    pub node_state: NodeReporting,
    /// Pool of its node; empty if it has none.
    pub pool: String,
    /// The device.
    pub device: Device,
}

/// `gpupack top tenants`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TenantList {
    /// Version of this body.
    pub api_version: ApiVersion,
    /// `TenantList`.
    pub kind: TenantListKind,
    /// The tenants, once for each of their devices.
    pub items: Vec<TenantItem>,
}

/// A tenant with its device and node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct TenantItem {
    /// Name of the node.
    pub node: String,
    /// NVML index of the device.
    pub gpu_index: u32,
    /// UUID of the device.
    pub gpu_id: String,
    /// The tenant.
    pub tenant: Tenant,
}
