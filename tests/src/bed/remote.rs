//! Code that runs in a pod: a forked child in the pod's namespace and cgroup, and what it tells the test.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::io::{self, Read, Write};
use std::marker::PhantomData;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::sys::{Place, fork_into, wait_readable};

/// How long `Pod::run` and the first stage of `Pod::serve` may take.
pub(super) const DEFAULT_DEADLINE: Duration = Duration::from_secs(20);

/// What went wrong in a pod: the chain of errors as text, and the errno where there was one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteError {
    /// The pod.
    pub pod: String,
    /// The error with its causes.
    pub text: String,
    /// The number of the operating system's error at the bottom of it.
    pub errno: Option<i32>,
}

impl std::fmt::Display for RemoteError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "in pod {}: {}", self.pod, self.text)
    }
}

impl std::error::Error for RemoteError {}

/// The errno of an error that came from a pod, or of any error of the operating system.
pub fn errno(error: &anyhow::Error) -> Option<i32> {
    error.chain().find_map(|cause| {
        cause
            .downcast_ref::<RemoteError>()
            .and_then(|remote| remote.errno)
            .or_else(|| cause.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error))
            .or_else(|| cause.downcast_ref::<nix::errno::Errno>().map(|errno| *errno as i32))
    })
}

#[derive(Serialize, Deserialize)]
enum Frame {
    Stage(serde_json::Value),
    Value(serde_json::Value),
    Error(RemoteError),
}

/// How code in a pod keeps step with the test.
pub struct Stage {
    stream: UnixStream,
}

impl Stage {
    /// Tells the test that the code has come this far, with something it needs to know; see [`Running::stage`].
    pub fn reached<M: Serialize>(&self, message: M) -> anyhow::Result<()> {
        send(&self.stream, &Frame::Stage(serde_json::to_value(message)?))
    }

    /// Waits until the test calls [`Running::proceed`].
    pub fn hold(&self) -> anyhow::Result<()> {
        let mut byte = [0];
        (&self.stream)
            .read_exact(&mut byte)
            .context("wait for the test's word to proceed")
    }
}

/// Code that is running in a pod; killed when dropped.
#[must_use = "the code is killed when this is dropped"]
pub struct Running<T> {
    pod: String,
    pid: Pid,
    pidfd: OwnedFd,
    stream: UnixStream,
    received: Vec<u8>,
    reaped: bool,
    result: PhantomData<fn() -> T>,
}

impl<T: Serialize + DeserializeOwned> Running<T> {
    pub(super) fn start(
        pod: &str,
        place: &Place,
        work: impl FnOnce(&Stage) -> anyhow::Result<T>,
    ) -> anyhow::Result<Self> {
        note_panic_locations();
        let body = |stream: UnixStream, entered: io::Result<()>| {
            IN_POD.set(true);
            let stage = Stage { stream };
            let outcome = catch_unwind(AssertUnwindSafe(|| -> anyhow::Result<serde_json::Value> {
                entered.context("enter the pod's cgroup and network namespace")?;
                Ok(serde_json::to_value(work(&stage)?)?)
            }));
            let frame = match outcome {
                Ok(Ok(value)) => Frame::Value(value),
                Ok(Err(error)) => Frame::Error(RemoteError {
                    pod: pod.to_owned(),
                    text: format!("{error:#}"),
                    errno: errno(&error),
                }),
                Err(panic) => Frame::Error(RemoteError {
                    pod: pod.to_owned(),
                    text: panic_text(&*panic),
                    errno: None,
                }),
            };
            // The test may be gone; there is nobody else to tell.
            let _ = send(&stage.stream, &frame);
        };
        let (pid, stream, pidfd) = fork_into(place, body).with_context(|| format!("fork into pod {pod}"))?;
        let running = Self {
            pod: pod.to_owned(),
            pid,
            pidfd,
            stream,
            received: Vec::new(),
            reaped: false,
            result: PhantomData,
        };
        running
            .stream
            .set_nonblocking(true)
            .context("make the stream to the pod non-blocking")?;
        Ok(running)
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw().unsigned_abs()
    }

    /// Waits for the code to reach its next stage and gives what it said there.
    pub fn stage<M: DeserializeOwned>(&mut self, deadline: Duration) -> anyhow::Result<M> {
        match self.next_frame(deadline)? {
            Frame::Stage(message) => serde_json::from_value(message).context("read what the pod said at its stage"),
            Frame::Value(_) => bail!("the code in pod {} ended without another stage", self.pod),
            Frame::Error(error) => Err(error.into()),
        }
    }

    /// Lets code go on that waits in [`Stage::hold`].
    pub fn proceed(&self) -> anyhow::Result<()> {
        (&self.stream)
            .write_all(&[1])
            .with_context(|| format!("tell pod {} to proceed", self.pod))
    }

    /// Waits for the code to end, at most so long, and gives its result. Stages on the way are skipped.
    pub fn join(mut self, deadline: Duration) -> anyhow::Result<T> {
        let end = Instant::now() + deadline;
        loop {
            match self.next_frame(end.saturating_duration_since(Instant::now()))? {
                Frame::Stage(_) => {}
                Frame::Value(value) => return serde_json::from_value(value).context("read the pod's result"),
                Frame::Error(error) => return Err(error.into()),
            }
        }
    }

    fn next_frame(&mut self, deadline: Duration) -> anyhow::Result<Frame> {
        let end = Instant::now() + deadline;
        loop {
            if let Some(frame) = self.parse_frame()? {
                return Ok(frame);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("the code in pod {} did not answer within {deadline:?}", self.pod);
            }
            let [readable, ended] = wait_readable([self.stream.as_fd(), self.pidfd.as_fd()], left)?;
            if readable && self.receive()? > 0 {
                continue;
            }
            if ended {
                // Forks of other tests may hold the stream open, so it is the process' end that counts.
                self.reaped = true;
                let status = waitpid(self.pid, None).context("wait for the code in the pod")?;
                let how = match status {
                    WaitStatus::Signaled(_, signal, _) => format!("killed by {signal}"),
                    other => format!("{other:?}"),
                };
                bail!("the code in pod {} ended without a result: {how}", self.pod);
            }
        }
    }

    fn receive(&mut self) -> anyhow::Result<usize> {
        let mut buffer = [0; 64 << 10];
        match self.stream.read(&mut buffer) {
            Ok(count) => {
                self.received.extend_from_slice(&buffer[..count]);
                Ok(count)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            Err(error) => Err(error).context("read from the pod"),
        }
    }

    fn parse_frame(&mut self) -> anyhow::Result<Option<Frame>> {
        let Some(head) = self.received.first_chunk::<4>() else {
            return Ok(None);
        };
        let length = 4 + u32::from_le_bytes(*head) as usize;
        if self.received.len() < length {
            return Ok(None);
        }
        let frame = serde_json::from_slice(&self.received[4..length]).context("read a message of the pod")?;
        self.received.drain(..length);
        Ok(Some(frame))
    }
}

impl<T> Running<T> {
    /// Sends a signal to the process.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        kill(self.pid, signal).with_context(|| format!("send {signal} to the code in pod {}", self.pod))
    }
}

impl<T> Drop for Running<T> {
    fn drop(&mut self) {
        if !self.reaped {
            // Not yet waited for, so the id is still this child's.
            let _ = kill(self.pid, Signal::SIGKILL);
            let _ = waitpid(self.pid, None);
        }
    }
}

fn send(mut stream: &UnixStream, frame: &Frame) -> anyhow::Result<()> {
    let body = serde_json::to_vec(frame)?;
    let mut bytes = u32::try_from(body.len())
        .context("a message of more than 4 GiB")?
        .to_le_bytes()
        .to_vec();
    bytes.extend(body);
    stream.write_all(&bytes).context("write to the test")
}

thread_local! {
    static IN_POD: Cell<bool> = const { Cell::new(false) };
    static PANICKED_AT: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Keeps the place of a panic in a pod for the message to the test, which prints it; the payload does not carry it.
fn note_panic_locations() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if IN_POD.get() {
                PANICKED_AT.with_borrow_mut(|place| *place = info.location().map(ToString::to_string));
            } else {
                previous(info);
            }
        }));
    });
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let message = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("with something else than a text");
    let place = PANICKED_AT
        .with_borrow_mut(Option::take)
        .unwrap_or_else(|| "an unknown place".to_owned());
    format!("panicked at {place}: {message}")
}
