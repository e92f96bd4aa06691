//! Requests to the API server: lists in pages, and watches.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::ACCEPT;
use http::{Request, Response};
use http_body_util::BodyExt as _;
use kube::Client;
use kube::client::Body;
use prost::Message as _;
use serde_json::Value;
use tokio::time::timeout;

use super::error::{ApiError, DecodeError};
use super::kind::{Encoding, Kind};
use super::wire;
use crate::identity::causes;

/// Objects in one answer. More make the answer's buffer larger, fewer the list slower.
const PAGE: usize = 500;
/// How long the API server may take to begin an answer, and to end a page.
const ANSWER: Duration = Duration::from_secs(30);
/// A watch is told of progress each minute; one that hears nothing for longer is on a dead connection.
pub(super) const SILENCE: Duration = Duration::from_secs(150);
/// How long a watch lasts before the API server is asked anew, so that agents spread over its instances again.
const WATCH_SECONDS: std::ops::Range<u64> = 300..600;
/// No object of the API is as large.
const MAX_FRAME: usize = 32 << 20;

/// An object as it was received.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Object {
    Protobuf(Bytes),
    Json(Box<Value>),
}

impl Object {
    /// Its resource version.
    pub(super) fn version(&self) -> Result<String, DecodeError> {
        let version = match self {
            Self::Protobuf(bytes) => {
                let metadata = wire::Versioned::decode(bytes.clone())?.metadata.unwrap_or_default();
                wire::text(&metadata.resource_version)?.to_owned()
            }
            Self::Json(object) => object["metadata"]["resourceVersion"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
        };
        if version.is_empty() {
            return Err(DecodeError::Lacks("resourceVersion"));
        }
        Ok(version)
    }
}

/// What a watch tells.
#[derive(Debug, PartialEq)]
pub(super) enum Told {
    Set(Object),
    Gone(Object),
    /// Nothing has happened until this object's version.
    Bookmark(Object),
    /// The watch cannot go on.
    Failed {
        code: u16,
        message: String,
    },
}

/// Part of a list.
pub(super) struct Page {
    pub(super) items: Vec<Object>,
    /// The version of the whole list.
    pub(super) version: String,
    /// What to ask for the next part with; none at the end.
    pub(super) rest: Option<String>,
}

/// The part of a list that begins with `rest`.
pub(super) async fn list(client: &Client, kind: Kind, rest: Option<&str>) -> Result<Page, ApiError> {
    let what = || format!("listing {}", kind.name());
    let mut uri = format!("{}limit={PAGE}", kind.path());
    if let Some(rest) = rest {
        uri.push_str("&continue=");
        uri.push_str(rest);
    }
    let response = get(client, kind, &uri, &what).await?;
    let body = match timeout(ANSWER, response.into_body().collect()).await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(error)) => return Err(broken(what(), &error)),
        Err(_) => return Err(late(what())),
    };
    page(kind, body).map_err(|reason| ApiError::Malformed { what: what(), reason })
}

fn page(kind: Kind, body: Bytes) -> Result<Page, DecodeError> {
    let (items, version, rest) = match kind.encoding() {
        Encoding::Protobuf => {
            let list = wire::List::decode(wire::open(body)?)?;
            let metadata = list.metadata.unwrap_or_default();
            let items = list.items.into_iter().map(Object::Protobuf).collect();
            (items, metadata.resource_version, metadata.r#continue)
        }
        Encoding::Json => {
            let mut list: Value =
                serde_json::from_slice(&body).map_err(|error| DecodeError::Json(error.to_string()))?;
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let (version, rest) = (&list["metadata"]["resourceVersion"], &list["metadata"]["continue"]);
            let (version, rest) = (text(version), text(rest));
            let items = match list["items"].take() {
                Value::Array(items) => items,
                _ => return Err(DecodeError::Lacks("items")),
            };
            (
                items.into_iter().map(|item| Object::Json(Box::new(item))).collect(),
                version,
                rest,
            )
        }
    };
    match version.is_empty() {
        true => Err(DecodeError::Lacks("resourceVersion")),
        false => Ok(Page {
            items,
            version,
            rest: Some(rest).filter(|rest| !rest.is_empty()),
        }),
    }
}

/// A watch under way.
pub(super) struct Watch {
    kind: Kind,
    body: Body,
    frames: Frames,
}

/// What happens from a version on.
pub(super) async fn watch(client: &Client, kind: Kind, version: &str) -> Result<Watch, ApiError> {
    let seconds = fastrand::u64(WATCH_SECONDS);
    let uri = format!(
        "{}watch=1&allowWatchBookmarks=true&resourceVersion={version}&timeoutSeconds={seconds}",
        kind.path()
    );
    let response = get(client, kind, &uri, &|| watching(kind)).await?;
    Ok(Watch {
        kind,
        body: response.into_body(),
        frames: Frames {
            encoding: kind.encoding(),
            buffer: BytesMut::new(),
        },
    })
}

impl Watch {
    /// What is told next; nothing at the watch's end. Where nothing is heard for as long as `silence`, the connection is
    /// dead. Cancelling loses nothing.
    pub(super) async fn next(&mut self, silence: Duration) -> Result<Option<Vec<Told>>, ApiError> {
        loop {
            let told = self.frames.take().map_err(|reason| ApiError::Malformed {
                what: watching(self.kind),
                reason,
            })?;
            if !told.is_empty() {
                return Ok(Some(told));
            }
            match timeout(silence, self.body.frame()).await {
                Ok(None) => return Ok(None),
                Ok(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        self.frames.add(data);
                    }
                }
                Ok(Some(Err(error))) => return Err(broken(watching(self.kind), &error)),
                Err(_) => {
                    return Err(ApiError::Silent {
                        what: watching(self.kind),
                        seconds: silence.as_secs(),
                    });
                }
            }
        }
    }
}

fn watching(kind: Kind) -> String {
    format!("watching {}", kind.name())
}

/// A watch's bytes, to be cut into what it tells: messages after their length, or lines.
struct Frames {
    encoding: Encoding,
    buffer: BytesMut,
}

impl Frames {
    fn add(&mut self, data: Bytes) {
        match (self.buffer.is_empty(), data.try_into_mut()) {
            // Nearly always: no copy.
            (true, Ok(data)) => self.buffer = data,
            (_, Ok(data)) => self.buffer.extend_from_slice(&data),
            (_, Err(data)) => self.buffer.extend_from_slice(&data),
        }
    }

    fn take(&mut self) -> Result<Vec<Told>, DecodeError> {
        let mut told = Vec::new();
        while let Some(frame) = self.frame()? {
            told.push(match self.encoding {
                Encoding::Protobuf => from_protobuf(frame)?,
                Encoding::Json => from_json(&frame)?,
            });
        }
        Ok(told)
    }

    fn frame(&mut self) -> Result<Option<Bytes>, DecodeError> {
        let whole = match self.encoding {
            Encoding::Protobuf => {
                let Some(length) = self.buffer.first_chunk() else {
                    return Ok(None);
                };
                let length = u32::from_be_bytes(*length) as usize;
                if length > MAX_FRAME {
                    return Err(DecodeError::TooLarge(length));
                }
                (self.buffer.len() >= 4 + length).then_some((4, 4 + length))
            }
            Encoding::Json => self
                .buffer
                .iter()
                .position(|byte| *byte == b'\n')
                .map(|end| (0, end + 1)),
        };
        match whole {
            Some((start, end)) => Ok(Some(self.buffer.split_to(end).freeze().slice(start..))),
            None if self.buffer.len() > MAX_FRAME + 4 => Err(DecodeError::TooLarge(self.buffer.len())),
            None => Ok(None),
        }
    }
}

fn from_protobuf(frame: Bytes) -> Result<Told, DecodeError> {
    let event = wire::WatchEvent::decode(frame)?;
    let raw = wire::open(event.object.ok_or(DecodeError::Lacks("object"))?.raw)?;
    match &event.r#type[..] {
        b"ADDED" | b"MODIFIED" => Ok(Told::Set(Object::Protobuf(raw))),
        b"DELETED" => Ok(Told::Gone(Object::Protobuf(raw))),
        b"BOOKMARK" => Ok(Told::Bookmark(Object::Protobuf(raw))),
        b"ERROR" => {
            let wire::Status { message, code } = wire::Status::decode(raw)?;
            let code = u16::try_from(code).unwrap_or_default();
            Ok(Told::Failed { code, message })
        }
        other => Err(DecodeError::EventType(String::from_utf8_lossy(other).into_owned())),
    }
}

fn from_json(line: &[u8]) -> Result<Told, DecodeError> {
    let mut event: Value = serde_json::from_slice(line).map_err(|error| DecodeError::Json(error.to_string()))?;
    let object = event["object"].take();
    match event["type"].as_str() {
        Some("ADDED" | "MODIFIED") => Ok(Told::Set(Object::Json(Box::new(object)))),
        Some("DELETED") => Ok(Told::Gone(Object::Json(Box::new(object)))),
        Some("BOOKMARK") => Ok(Told::Bookmark(Object::Json(Box::new(object)))),
        Some("ERROR") => Ok(Told::Failed {
            code: object["code"]
                .as_u64()
                .and_then(|code| u16::try_from(code).ok())
                .unwrap_or_default(),
            message: object["message"].as_str().unwrap_or_default().to_owned(),
        }),
        other => Err(DecodeError::EventType(other.unwrap_or_default().to_owned())),
    }
}

async fn get(
    client: &Client,
    kind: Kind,
    uri: &str,
    what: &(dyn Fn() -> String + Sync),
) -> Result<Response<Body>, ApiError> {
    let unreachable = |error: &dyn std::error::Error| ApiError::Unreachable {
        what: what(),
        reason: causes(error),
    };
    let accept = match kind.encoding() {
        Encoding::Protobuf => "application/vnd.kubernetes.protobuf",
        Encoding::Json => "application/json",
    };
    let request = Request::get(uri).header(ACCEPT, accept).body(Body::empty());
    let request = request.map_err(|error| unreachable(&error))?;
    let response = match timeout(ANSWER, client.send(request)).await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => return Err(unreachable(&error)),
        Err(_) => return Err(late(what())),
    };
    if response.status().is_success() {
        return Ok(response);
    }
    let code = response.status().as_u16();
    let body = timeout(ANSWER, response.into_body().collect()).await;
    let body = body
        .ok()
        .and_then(Result::ok)
        .map(|body| body.to_bytes())
        .unwrap_or_default();
    Err(ApiError::Refused {
        what: what(),
        code,
        message: message(body).map_or_else(String::new, |message| format!(": {message}")),
    })
}

/// What an answer that is no success says, in either encoding.
fn message(body: Bytes) -> Option<String> {
    if let Ok(status) = wire::open(body.clone()).and_then(|raw| Ok(wire::Status::decode(raw)?)) {
        return Some(status.message);
    }
    let status: Value = serde_json::from_slice(&body).ok()?;
    Some(status["message"].as_str()?.to_owned())
}

fn late(what: String) -> ApiError {
    let seconds = ANSWER.as_secs();
    ApiError::Timeout { what, seconds }
}

fn broken(what: String, error: &dyn std::error::Error) -> ApiError {
    let reason = causes(error);
    ApiError::Broken { what, reason }
}
