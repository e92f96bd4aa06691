//! The Kubernetes API's protobuf encoding, as far as this source reads it.
//!
//! Messages name only the fields that are used, by their numbers in the published definitions; all else is skipped
//! without being allocated. Texts are slices of what was received, and maps are lists of undecoded entries.

use bytes::Bytes;
use prost::Message;

use super::error::DecodeError;

/// What stands before every message but the outer one of a watch.
const MAGIC: &[u8] = b"k8s\0";

/// `runtime.Unknown`.
#[derive(Clone, PartialEq, Message)]
struct Unknown {
    #[prost(bytes = "bytes", tag = "2")]
    raw: Bytes,
}

/// A list of any kind.
#[derive(Clone, PartialEq, Message)]
pub(super) struct List {
    #[prost(message, optional, tag = "1")]
    pub(super) metadata: Option<ListMeta>,
    #[prost(bytes = "bytes", repeated, tag = "2")]
    pub(super) items: Vec<Bytes>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ListMeta {
    #[prost(string, tag = "2")]
    pub(super) resource_version: String,
    #[prost(string, tag = "3")]
    pub(super) r#continue: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchEvent {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) r#type: Bytes,
    #[prost(message, optional, tag = "2")]
    pub(super) object: Option<RawExtension>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RawExtension {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) raw: Bytes,
}

/// What the API server says of a request that failed.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Status {
    #[prost(string, tag = "3")]
    pub(super) message: String,
    #[prost(int32, tag = "6")]
    pub(super) code: i32,
}

/// An object of any kind, of which only its version is wanted.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Versioned {
    #[prost(message, optional, tag = "1")]
    pub(super) metadata: Option<Version>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Version {
    #[prost(bytes = "bytes", tag = "6")]
    pub(super) resource_version: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ObjectMeta {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) name: Bytes,
    #[prost(bytes = "bytes", tag = "3")]
    pub(super) namespace: Bytes,
    #[prost(bytes = "bytes", tag = "5")]
    pub(super) uid: Bytes,
    #[prost(message, optional, tag = "8")]
    pub(super) creation_timestamp: Option<Time>,
    #[prost(message, optional, tag = "9")]
    pub(super) deletion_timestamp: Option<Time>,
    #[prost(bytes = "bytes", repeated, tag = "11")]
    pub(super) labels: Vec<Bytes>,
    #[prost(bytes = "bytes", repeated, tag = "12")]
    pub(super) annotations: Vec<Bytes>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct Time {
    #[prost(int64, tag = "1")]
    pub(super) seconds: i64,
}

/// An entry of a map of texts.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Entry {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) key: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) value: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Namespace {
    #[prost(message, optional, tag = "1")]
    pub(super) metadata: Option<ObjectMeta>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Node {
    #[prost(message, optional, tag = "1")]
    pub(super) metadata: Option<ObjectMeta>,
    #[prost(message, optional, tag = "2")]
    pub(super) spec: Option<NodeSpec>,
    #[prost(message, optional, tag = "3")]
    pub(super) status: Option<NodeStatus>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct NodeSpec {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) pod_cidr: Bytes,
    #[prost(bytes = "bytes", repeated, tag = "7")]
    pub(super) pod_cidrs: Vec<Bytes>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct NodeStatus {
    #[prost(message, repeated, tag = "5")]
    pub(super) addresses: Vec<NodeAddress>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct NodeAddress {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) r#type: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) address: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Pod {
    #[prost(message, optional, tag = "1")]
    pub(super) metadata: Option<ObjectMeta>,
    #[prost(message, optional, tag = "2")]
    pub(super) spec: Option<PodSpec>,
    #[prost(message, optional, tag = "3")]
    pub(super) status: Option<PodStatus>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PodSpec {
    #[prost(bytes = "bytes", tag = "8")]
    pub(super) service_account_name: Bytes,
    #[prost(bytes = "bytes", tag = "10")]
    pub(super) node_name: Bytes,
    #[prost(bool, tag = "11")]
    pub(super) host_network: bool,
    #[prost(bytes = "bytes", tag = "29")]
    pub(super) runtime_class_name: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PodStatus {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) phase: Bytes,
    #[prost(message, repeated, tag = "2")]
    pub(super) conditions: Vec<PodCondition>,
    #[prost(bytes = "bytes", tag = "6")]
    pub(super) pod_ip: Bytes,
    #[prost(message, repeated, tag = "12")]
    pub(super) pod_ips: Vec<PodIp>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PodCondition {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) r#type: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) status: Bytes,
    #[prost(bytes = "bytes", tag = "5")]
    pub(super) reason: Bytes,
    #[prost(bytes = "bytes", tag = "6")]
    pub(super) message: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PodIp {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) ip: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Service {
    #[prost(message, optional, tag = "1")]
    pub(super) metadata: Option<ObjectMeta>,
    #[prost(message, optional, tag = "2")]
    pub(super) spec: Option<ServiceSpec>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ServiceSpec {
    #[prost(message, repeated, tag = "1")]
    pub(super) ports: Vec<ServicePort>,
    #[prost(bytes = "bytes", tag = "3")]
    pub(super) cluster_ip: Bytes,
    #[prost(bytes = "bytes", tag = "4")]
    pub(super) r#type: Bytes,
    #[prost(bytes = "bytes", tag = "7")]
    pub(super) session_affinity: Bytes,
    #[prost(bytes = "bytes", repeated, tag = "18")]
    pub(super) cluster_ips: Vec<Bytes>,
    #[prost(bytes = "bytes", tag = "22")]
    pub(super) internal_traffic_policy: Bytes,
    #[prost(bytes = "bytes", tag = "23")]
    pub(super) traffic_distribution: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ServicePort {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) name: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) protocol: Bytes,
    #[prost(int32, tag = "3")]
    pub(super) port: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct EndpointSlice {
    #[prost(message, optional, tag = "1")]
    pub(super) metadata: Option<ObjectMeta>,
    #[prost(message, repeated, tag = "2")]
    pub(super) endpoints: Vec<Endpoint>,
    #[prost(message, repeated, tag = "3")]
    pub(super) ports: Vec<EndpointPort>,
    #[prost(bytes = "bytes", tag = "4")]
    pub(super) address_type: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Endpoint {
    #[prost(bytes = "bytes", repeated, tag = "1")]
    pub(super) addresses: Vec<Bytes>,
    #[prost(message, optional, tag = "2")]
    pub(super) conditions: Option<EndpointConditions>,
    #[prost(message, optional, tag = "4")]
    pub(super) target_ref: Option<ObjectReference>,
    #[prost(bytes = "bytes", tag = "6")]
    pub(super) node_name: Bytes,
    #[prost(bytes = "bytes", tag = "7")]
    pub(super) zone: Bytes,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct EndpointConditions {
    #[prost(bool, optional, tag = "1")]
    pub(super) ready: Option<bool>,
    #[prost(bool, optional, tag = "2")]
    pub(super) serving: Option<bool>,
    #[prost(bool, optional, tag = "3")]
    pub(super) terminating: Option<bool>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ObjectReference {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) kind: Bytes,
    #[prost(bytes = "bytes", tag = "4")]
    pub(super) uid: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct EndpointPort {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) name: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) protocol: Bytes,
    #[prost(int32, optional, tag = "3")]
    pub(super) port: Option<i32>,
}

/// The message within an envelope.
pub(super) fn open(mut envelope: Bytes) -> Result<Bytes, DecodeError> {
    if !envelope.starts_with(MAGIC) {
        return Err(DecodeError::NoEnvelope);
    }
    Ok(Unknown::decode(envelope.split_off(MAGIC.len()))?.raw)
}

/// A text of the API, which are all UTF-8.
pub(super) fn text(bytes: &Bytes) -> Result<&str, DecodeError> {
    std::str::from_utf8(bytes).map_err(|_| DecodeError::NotUtf8)
}
