//! `adit probe`: whether the proxy of this container is ready, by its own word.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use thiserror::Error;

/// How long the proxy may take to answer.
const DEADLINE: Duration = Duration::from_secs(2);

/// `adit probe`.
#[derive(Debug, Clone, Args)]
pub struct ProbeArgs {
    /// The socket that `adit node` was given
    #[arg(long, value_name = "PATH", env = "ADIT_PROBE_SOCKET")]
    probe_socket: PathBuf,
}

/// Why a probe fails.
#[derive(Debug, Error)]
pub enum ProbeError {
    /// Nobody answers.
    #[error("asking the proxy at {path}: {error}")]
    Silent {
        /// The socket.
        path: PathBuf,
        /// What happened.
        error: io::Error,
    },
    /// It is not ready; the text says what is pending.
    #[error("not ready: {0}")]
    NotReady(String),
}

/// Asks the proxy. What it says where it is ready.
pub fn probe(args: &ProbeArgs) -> Result<String, ProbeError> {
    let answer = ask(&args.probe_socket).map_err(|error| ProbeError::Silent {
        path: args.probe_socket.clone(),
        error,
    })?;
    verdict(&answer)
}

fn ask(socket: &Path) -> io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    stream.set_write_timeout(Some(DEADLINE))?;
    stream.write_all(b"GET /healthz/ready HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

fn verdict(answer: &str) -> Result<String, ProbeError> {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer, ""));
    let ready = head.split(' ').nth(1) == Some("200");
    let said = body.lines().collect::<Vec<_>>().join("; ");
    if ready {
        Ok(said)
    } else {
        Err(ProbeError::NotReady(said))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_200_is_ready() {
        assert_eq!(verdict("HTTP/1.0 200 OK\r\ndate: x\r\n\r\nready\n").unwrap(), "ready");
        let pending = "HTTP/1.0 503 Service Unavailable\r\n\r\nkernel programs\ncertificate of x\n";
        let error = verdict(pending).unwrap_err().to_string();
        assert_eq!(error, "not ready: kernel programs; certificate of x");
        assert!(verdict("").is_err());
    }

    #[test]
    fn a_proxy_that_is_not_there_is_not_ready() {
        let folder = tempfile::tempdir().unwrap();
        let probe_socket = folder.path().join("probe.sock");
        let error = probe(&ProbeArgs { probe_socket }).unwrap_err();
        assert!(matches!(error, ProbeError::Silent { .. }), "{error}");
    }
}
