//! The audit log: one line for each request, written before its answer is.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::counts::Counts;
use super::token::Caller;
use crate::telemetry::{LogFormat, Record};

/// The longest piece of a caller's text that is repeated in the log.
const MAX_LOGGED_CHARS: usize = 256;

/// What is known of a call.
#[derive(Debug, Default)]
pub(super) struct Entry {
    pub(super) peer: Option<SocketAddr>,
    pub(super) caller: Option<Caller>,
    /// Where the caller's pod runs, as far as that is known.
    pub(super) node: Option<String>,
    /// As it was asked for.
    pub(super) identity: Option<String>,
    /// The pod that entitles the caller, `namespace/name`.
    pub(super) pod: Option<String>,
}

impl Entry {
    pub(super) fn asks_for(&mut self, identity: Option<&str>) {
        self.identity = identity.map(|text| text.chars().take(MAX_LOGGED_CHARS).collect());
    }
}

/// How a call ended.
#[derive(Debug)]
pub(super) enum Outcome<'a> {
    Granted {
        serial: &'a str,
        lifetime: Duration,
        not_after: SystemTime,
    },
    Refused {
        /// The rule that refused it, in one word.
        rule: &'static str,
        reason: &'a str,
    },
}

/// Where lines go. There is no queue that could run over: a certificate is not answered before its line is written, and who
/// reads the log too slowly slows down the authority. What cannot be written at all is counted and told of.
pub struct AuditLog {
    format: LogFormat,
    counts: Counts,
    out: Mutex<Out>,
}

struct Out {
    writer: Box<dyn Write + Send>,
    /// Lines since the last one that was written.
    lost: u64,
}

impl AuditLog {
    /// Lines on standard error, among those of the process's own log.
    pub fn on_standard_error(format: LogFormat, counts: Counts) -> Self {
        Self::new(format, counts, Box::new(io::stderr()))
    }

    pub(super) fn new(format: LogFormat, counts: Counts, writer: Box<dyn Write + Send>) -> Self {
        Self {
            format,
            counts,
            out: Mutex::new(Out { writer, lost: 0 }),
        }
    }

    pub(super) fn write(&self, entry: &Entry, outcome: &Outcome<'_>) {
        let now = SystemTime::now();
        let mut line = String::with_capacity(512);
        self.describe(&mut line, now, entry, outcome);
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        if out.lost > 0 {
            let mut said = String::with_capacity(128);
            let mut record = self.begin(&mut said, now, "error");
            record.text("message", "audit lines could not be written");
            record.number("lost", out.lost);
            record.end();
            if out.write(&said).is_ok() {
                out.lost = 0;
            }
        }
        if out.write(&line).is_err() {
            out.lost += 1;
            self.counts.audit_lost();
        }
    }

    fn begin<'a>(&self, line: &'a mut String, now: SystemTime, level: &str) -> Record<'a> {
        let mut record = Record::begin(line, self.format, now);
        record.text("level", level);
        record.text("target", "audit");
        record
    }

    /// Whatever a caller has put into its token or request is escaped.
    fn describe(&self, line: &mut String, now: SystemTime, entry: &Entry, outcome: &Outcome<'_>) {
        let (level, message, word) = match outcome {
            Outcome::Granted { .. } => ("info", "certificate granted", "granted"),
            Outcome::Refused { .. } => ("warn", "certificate refused", "refused"),
        };
        let mut record = self.begin(line, now, level);
        record.text("message", message);
        record.text("outcome", word);
        let caller = entry.caller.as_ref();
        match caller {
            Some(caller) => record.value("caller", &caller.account),
            None => record.text("caller", "unknown"),
        }
        if let Some(pod) = caller.and_then(|caller| caller.pod.as_ref()) {
            record.text("caller_pod", &pod.name);
            record.text("caller_pod_uid", &pod.uid);
        }
        let said = caller.and_then(|caller| caller.node.as_ref()).map(|node| &node.name);
        record.text("node", entry.node.as_ref().or(said).map_or("", String::as_str));
        record.text("identity", entry.identity.as_deref().unwrap_or_default());
        match outcome {
            Outcome::Granted {
                serial,
                lifetime,
                not_after,
            } => {
                record.text("pod", entry.pod.as_deref().unwrap_or_default());
                record.text("serial", serial);
                record.number("lifetime_s", lifetime.as_secs());
                record.number("not_after", seconds(*not_after));
                record.text("rule", "pod_on_node");
            }
            Outcome::Refused { rule, reason } => {
                record.text("rule", rule);
                record.text("reason", &reason.chars().take(MAX_LOGGED_CHARS).collect::<String>());
            }
        }
        if let Some(peer) = &entry.peer {
            record.value("peer", peer);
        }
        record.end();
    }
}

impl Out {
    /// A whole line in one piece, so that no other line gets in between.
    fn write(&mut self, line: &str) -> io::Result<()> {
        self.writer.write_all(line.as_bytes())?;
        self.writer.flush()
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// What has been written, by anybody who has a clone, and whether more can be.
    #[derive(Clone, Default)]
    pub(in crate::ca) struct Sink {
        written: Arc<Mutex<Vec<u8>>>,
        broken: Arc<AtomicBool>,
    }

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.broken.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            self.written.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Sink {
        pub(in crate::ca) fn lines(&self) -> Vec<serde_json::Value> {
            let text = String::from_utf8(self.written.lock().unwrap().clone()).unwrap();
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
        }
    }

    fn refused(log: &AuditLog, reason: &str) {
        log.write(&Entry::default(), &Outcome::Refused { rule: "token", reason });
    }

    #[test]
    fn lines_that_cannot_be_written_are_counted_and_told_of_with_their_number() {
        let (sink, counts) = (Sink::default(), Counts::default());
        let log = AuditLog::new(LogFormat::Json, counts.clone(), Box::new(sink.clone()));
        refused(&log, "first");
        sink.broken.store(true, Ordering::Relaxed);
        for _ in 0..3 {
            refused(&log, "lost");
        }
        sink.broken.store(false, Ordering::Relaxed);
        refused(&log, "last");
        let lines = sink.lines();
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert_eq!((&lines[1]["level"], &lines[1]["lost"]), (&"error".into(), &3.into()));
        assert_eq!(
            (&lines[0]["reason"], &lines[2]["reason"]),
            (&"first".into(), &"last".into())
        );
        assert_eq!(counts.lost(), 3);
    }

    #[test]
    fn what_a_caller_writes_stays_in_its_place() {
        let sink = Sink::default();
        let log = AuditLog::new(LogFormat::Json, Counts::default(), Box::new(sink.clone()));
        let mut entry = Entry::default();
        entry.asks_for(Some(&format!("a\" outcome=granted\n{}", "x".repeat(5000))));
        log.write(
            &entry,
            &Outcome::Refused {
                rule: "token",
                reason: "\n\u{1b}[2J",
            },
        );
        let lines = sink.lines();
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0]["identity"].as_str().unwrap().chars().count(), MAX_LOGGED_CHARS);
        assert_eq!(
            (&lines[0]["outcome"], &lines[0]["target"]),
            (&"refused".into(), &"audit".into())
        );
    }
}
