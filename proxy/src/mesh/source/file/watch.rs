//! Following the file as it changes.

use std::io;
use std::time::{Duration, SystemTime};

use tracing::{error, info, warn};

use super::{FileSource, Loaded, Signature, read};
use crate::mesh::source::SourceError;

/// How often the file is looked at.
const POLL: Duration = Duration::from_millis(500);
/// How long a changed file must stay the same before it is read: whoever writes it in place is then done.
const SETTLE: Duration = Duration::from_millis(100);
/// How many times a file is waited for to settle before the next look.
const SETTLE_ROUNDS: u32 = 20;

type Seen = Result<Signature, io::ErrorKind>;

/// What came of reading a changed file.
enum Reading {
    /// The content in force again.
    Same(Signature),
    New(Box<Loaded>),
    /// The same broken content as before.
    StillBroken(Signature),
    Broken {
        error: SourceError,
        /// What was read, where it could be.
        read: Option<(Signature, u64)>,
    },
}

/// Content that was refused, by its hash, and why.
type Refused = Option<(u64, String)>;

impl FileSource {
    /// Follows the file for as long as the future is polled: publishes each new valid state and keeps the last where
    /// the file is missing or broken, which is logged once and shown in the [status](Self::status).
    ///
    /// The file may be replaced by rename, by a symlink's swap anywhere on its path, or be written in place. It is polled,
    /// since inotify does not see a swap in a parent folder and not every volume reports changes.
    ///
    /// Dropping the future ends it; a state that is being read then is not published.
    pub async fn watch(self) {
        self.watch_every(POLL, SETTLE).await;
    }

    pub(super) async fn watch_every(mut self, poll: Duration, settle: Duration) {
        let mut seen: Seen = Ok(self.read);
        let mut refused: Refused = None;
        loop {
            tokio::time::sleep(poll).await;
            let now = Signature::of(&self.path);
            if now == seen {
                continue;
            }
            let Some(settled) = self.settled(now, settle).await else {
                self.keep(&SourceError::Changing {
                    path: self.path.clone(),
                });
                continue;
            };
            seen = match settled {
                Ok(settled) => self.reload(settled, &mut refused).await.map_or(seen, Ok),
                Err(kind) => {
                    self.keep(&SourceError::Read {
                        path: self.path.clone(),
                        error: kind.into(),
                    });
                    Err(kind)
                }
            };
        }
    }

    /// The file's state once it stays the same; `None` where it does not come to rest.
    async fn settled(&self, mut now: Seen, settle: Duration) -> Option<Seen> {
        for _ in 0..SETTLE_ROUNDS {
            tokio::time::sleep(settle).await;
            let next = Signature::of(&self.path);
            if next == now {
                return Some(now);
            }
            now = next;
        }
        None
    }

    /// Reads the file and takes it over if it is good. Returns which state of it was read; `None` to read it again.
    async fn reload(&mut self, settled: Signature, refused: &mut Refused) -> Option<Signature> {
        let (path, content) = (self.path.clone(), self.content);
        let refused_before = refused.as_ref().map(|(hash, _)| *hash);
        // Tens of megabytes take seconds to parse; the runtime has other work.
        let reading = tokio::task::spawn_blocking(move || {
            let read = match read(&path) {
                Ok(read) => read,
                Err(error) => return Reading::Broken { error, read: None },
            };
            let hash = read.hash();
            if hash == content {
                return Reading::Same(read.signature);
            }
            if Some(hash) == refused_before {
                return Reading::StillBroken(read.signature);
            }
            match read.parse(&path) {
                Ok(loaded) => Reading::New(Box::new(loaded)),
                Err(error) => Reading::Broken {
                    error,
                    read: Some((read.signature, hash)),
                },
            }
        })
        .await
        .unwrap_or_else(|error| Reading::Broken {
            error: SourceError::BrokenOff {
                path: self.path.clone(),
                reason: error.to_string(),
            },
            read: None,
        });
        match reading {
            Reading::Same(signature) => {
                *refused = None;
                self.recovered();
                Some(signature)
            }
            Reading::StillBroken(signature) => {
                let reason = refused.as_ref().map(|(_, reason)| reason.clone());
                self.status.update(|status| status.last_error = reason);
                Some(signature)
            }
            Reading::New(loaded) => {
                *refused = None;
                let signature = loaded.signature;
                self.take_over(*loaded);
                Some(signature)
            }
            Reading::Broken { error, read } => self.broken(settled, &error, read, refused),
        }
    }

    /// Which state of the file that is broken need not be read again.
    fn broken(
        &self,
        settled: Signature,
        error: &SourceError,
        read: Option<(Signature, u64)>,
        refused: &mut Refused,
    ) -> Option<Signature> {
        // Whoever writes to it will be done soon.
        if matches!(error, SourceError::Changing { .. }) {
            return None;
        }
        self.keep(error);
        match (error, read) {
            (_, Some((signature, hash))) => {
                *refused = Some((hash, error.to_string()));
                Some(signature)
            }
            // May be over without a change of the file, as when file descriptors are short.
            (SourceError::Read { .. }, None) => None,
            (_, None) => Some(settled),
        }
    }

    fn take_over(&mut self, loaded: Loaded) {
        let (workloads, services, policies) = (
            loaded.mesh.workloads().count(),
            loaded.mesh.services().count(),
            loaded.mesh.policies().len(),
        );
        self.content = loaded.content;
        let generation = self.mesh.publish(loaded.mesh);
        self.status.update(|status| {
            status.last_loaded = SystemTime::now();
            status.generation = generation;
            status.last_error = None;
        });
        info!(path = %self.path.display(), generation, workloads, services, policies, "mesh file loaded");
    }

    /// The content in force is there again, after something else was, or after a mere touch.
    fn recovered(&self) {
        if self.status.load().last_error.is_some() {
            info!(path = %self.path.display(), "mesh file is as it was when last loaded");
        }
        self.status.update(|status| status.last_error = None);
    }

    /// Keeps the state in force and says why, once for each reason in a row.
    fn keep(&self, error: &SourceError) {
        let reason = error.to_string();
        let status = self.status.load();
        if status.last_error.as_ref() == Some(&reason) {
            return;
        }
        let generation = status.generation;
        match error {
            // Passes by itself where the file is only being replaced.
            SourceError::Read { .. } | SourceError::Changing { .. } => {
                warn!(generation, "{reason}; the last good state stays in force");
            }
            _ => error!(generation, "{reason}; the last good state stays in force"),
        }
        self.status.update(|status| status.last_error = Some(reason));
    }
}
