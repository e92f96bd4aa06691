//! Why a source's text is no mesh, and where.

use std::fmt;
use std::io;
use std::path::PathBuf;

use serde_saphyr::{Error as YamlError, Location};
use thiserror::Error;

use super::file::MAX_SIZE;
use crate::identity::SpiffeError;
use crate::mesh::{ExclusionError, IpBlockError, MeshError, StringMatchError};

/// Why a mesh could not be loaded from a file.
#[derive(Debug, Error)]
pub enum SourceError {
    /// The file could not be opened or read.
    #[error("cannot read the mesh file {}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        error: io::Error,
    },
    /// It is a folder, a pipe or a device.
    #[error("the mesh file {} is not a regular file", path.display())]
    NotAFile {
        /// The file.
        path: PathBuf,
    },
    /// It is larger than [`MAX_SIZE`].
    #[error("the mesh file {} is larger than {MAX_SIZE} bytes", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// It was written to while it was read.
    #[error("the mesh file {} changed while it was read; replace it by rename, so that it is never half-written", path.display())]
    Changing {
        /// The file.
        path: PathBuf,
    },
    /// Its text is no mesh.
    #[error("{}:{place}: {fault}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Where in the file.
        place: Place,
        /// What is wrong there.
        fault: Fault,
    },
    /// Reading it was broken off by a fault of this program or its end.
    #[error("reading the mesh file {} was broken off: {reason}", path.display())]
    BrokenOff {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

/// A place in a text: line and column, both from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The line.
    pub line: u64,
    /// The column, in characters.
    pub column: u64,
}

impl From<Location> for Place {
    fn from(location: Location) -> Self {
        Self {
            line: location.line(),
            column: location.column(),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}

/// What is wrong at a place.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Fault {
    /// The text is not UTF-8.
    #[error("not UTF-8")]
    Encoding,
    /// Not YAML, an unknown or missing field, or a value of the wrong kind.
    #[error("{0}")]
    Yaml(String),
    /// No trust domain.
    #[error("trustDomain: {0}")]
    TrustDomain(SpiffeError),
    /// Namespace and service account make no identity.
    #[error("namespace or serviceAccount: {0}")]
    Identity(SpiffeError),
    /// No name.
    #[error("{0:?} is not a name: 1 to 253 of the characters a-z A-Z 0-9 . - _")]
    Name(String),
    /// No uid.
    #[error("{0:?} is not a uid: 1 to 512 of the characters a-z A-Z 0-9 . - _ / :")]
    Uid(String),
    /// No IP address.
    #[error("{0:?} is not an IP address")]
    Address(String),
    /// A text is no range of addresses.
    #[error("{0:?} is not a range of IP addresses; write one like 10.244.0.0/16 or fd00::/8")]
    Range(String),
    /// Neither port number nor port name.
    #[error("{0:?} is neither a port from 1 to 65535 nor the name of one")]
    Port(String),
    /// What is to be left alone cannot be.
    #[error("{0}: {1}")]
    Exclusion(&'static str, ExclusionError),
    /// The network namespace's path is relative.
    #[error("netns: {} is not an absolute path", .0.display())]
    NetnsPath(PathBuf),
    /// A workload's node is not among the nodes, though there are some.
    #[error("node {0:?} is not listed under `nodes`")]
    UnknownNode(String),
    /// An endpoint's workload is not there.
    #[error("endpoint {0:?}: there is no such workload")]
    UnknownWorkload(String),
    /// A service has both or neither of selector and endpoints.
    #[error("a service has either `selector` or `endpoints` (`endpoints: []` for none)")]
    Endpoints,
    /// A selector without labels.
    #[error("a selector has at least one label; for all workloads of a namespace use `scope: namespace`")]
    EmptySelector,
    /// A selector on a policy that is not of workload scope.
    #[error("only a policy with `scope: workload` has a selector")]
    Selector,
    /// A list in a rule that has nothing in it.
    #[error("`{0}` is empty; leave it out where it shall not restrict")]
    EmptyList(&'static str),
    /// A match that says nothing.
    #[error("this match says nothing and would be skipped; give it a condition or remove it")]
    EmptyMatch,
    /// No condition on a string.
    #[error("{0:?}: {1}")]
    Pattern(String, StringMatchError),
    /// A principal with scheme, which would never match.
    #[error("{0:?}: principals are written without spiffe://")]
    Scheme(String),
    /// No service account.
    #[error("{0:?} is not a service account; write namespace/name, or name alone in a policy that has a namespace")]
    ServiceAccount(String),
    /// No IP block.
    #[error("{0:?}: {1}")]
    Block(String, IpBlockError),
    /// The parts do not make a mesh.
    #[error(transparent)]
    Mesh(#[from] MeshError),
}

impl Fault {
    /// The fault at its place.
    pub(super) fn at(self, location: Location) -> Misplaced {
        Misplaced {
            place: location.into(),
            fault: self,
        }
    }
}

/// A fault and its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Misplaced {
    pub(super) place: Place,
    pub(super) fault: Fault,
}

impl From<YamlError> for Misplaced {
    fn from(error: YamlError) -> Self {
        let location = error.location().unwrap_or(Location::UNKNOWN);
        Fault::Yaml(yaml_reason(&error)).at(location)
    }
}

/// The parser's words without the place, which stands before them already.
fn yaml_reason(error: &YamlError) -> String {
    if let YamlError::MultipleDocuments { .. } = error.without_snippet() {
        return "a mesh file is one YAML document; here begins a second".to_owned();
    }
    let text = error.without_snippet().to_string();
    match text.rfind(" at line ") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}
