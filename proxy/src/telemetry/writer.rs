//! The thread that writes log lines, so that the data path never waits for whoever reads them.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::line::{LogFormat, Record};

/// Lines that may wait; at a usual length, some 8 MiB.
const QUEUE: usize = 8192;
/// Bytes after which lines are written although more are waiting.
const BATCH: usize = 64 * 1024;
/// The thread rests so long after it has written all there was. Meanwhile lines gather, and those who hand them over
/// need not wake it, which would cost them a system call each.
const PAUSE: Duration = Duration::from_millis(2);

enum Item {
    Line(String),
    Flush(SyncSender<()>),
}

/// Takes lines without ever blocking; one thread writes them in order.
pub(super) struct LineWriter {
    queue: SyncSender<Item>,
    lost: Arc<AtomicU64>,
    format: LogFormat,
}

impl LineWriter {
    /// Starts the thread. It ends when the writer is dropped and all lines are written.
    pub(super) fn spawn(format: LogFormat, output: Box<dyn Write + Send>) -> io::Result<Self> {
        let (queue, lines) = sync_channel(QUEUE);
        let lost = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&lost);
        thread::Builder::new()
            .name("access-log".into())
            .spawn(move || write_lines(&lines, output, &counter, format))?;
        Ok(Self { queue, lost, format })
    }

    pub(super) fn format(&self) -> LogFormat {
        self.format
    }

    /// Hands over a line, which ends in a newline. Where the queue is full the line is lost, and counted.
    pub(super) fn send(&self, line: String) {
        if self.queue.try_send(Item::Line(line)).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Lines lost since the start, for want of room or because they could not be written.
    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Waits until all lines so far are written, or for `at_most`.
    pub(super) fn flush(&self, at_most: Duration) {
        let (done, wait) = sync_channel(1);
        let deadline = Instant::now() + at_most;
        let mut item = Item::Flush(done);
        // The standard library's queue has no sending with a deadline.
        while let Err(error) = self.queue.try_send(item) {
            match error {
                TrySendError::Full(back) if Instant::now() < deadline => item = back,
                _ => return,
            }
            thread::sleep(Duration::from_millis(1));
        }
        // Whether it was written in time or not, there is no more to do.
        let _ = wait.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    }
}

fn write_lines(lines: &Receiver<Item>, mut output: impl Write, lost: &AtomicU64, format: LogFormat) {
    let mut told = 0;
    let mut batch = Vec::with_capacity(BATCH + 4096);
    while let Ok(first) = lines.recv() {
        let mut waiting = Vec::new();
        let mut count = 0;
        let mut next = Some(first);
        while let Some(item) = next {
            match item {
                Item::Line(line) => {
                    batch.extend_from_slice(line.as_bytes());
                    count += 1;
                }
                Item::Flush(done) => waiting.push(done),
            }
            next = if batch.len() < BATCH {
                lines.try_recv().ok()
            } else {
                None
            };
        }
        if write_whole(&mut output, &batch).is_err() {
            lost.fetch_add(count, Ordering::Relaxed);
        }
        // Less than a batch: the queue has run empty, and whatever was lost was lost before here.
        let now = lost.load(Ordering::Relaxed);
        if batch.len() < BATCH
            && now != told
            && write_whole(&mut output, lost_line(format, now - told).as_bytes()).is_ok()
        {
            told = now;
        }
        let ran_empty = batch.len() < BATCH;
        batch.clear();
        for done in waiting {
            // The one who asked may have given up.
            let _ = done.send(());
        }
        if ran_empty {
            thread::sleep(PAUSE);
        }
    }
}

/// Writes all bytes, and waits where standard output was made non-blocking by a process that shares it.
fn write_whole(output: &mut impl Write, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match output.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(Duration::from_millis(5)),
            Err(error) => return Err(error),
        }
    }
    output.flush()
}

fn lost_line(format: LogFormat, count: u64) -> String {
    let mut line = String::new();
    let mut record = Record::begin(&mut line, format, SystemTime::now());
    record.event("access-log-lost");
    record.number("lines", count);
    record.end();
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Condvar, Mutex};

    /// Blocks every write until it is opened.
    #[derive(Clone, Default)]
    struct Gate(Arc<(Mutex<GateState>, Condvar)>);

    #[derive(Default)]
    struct GateState {
        open: bool,
        written: Vec<u8>,
    }

    impl Gate {
        fn open(&self) {
            self.0.0.lock().unwrap().open = true;
            self.0.1.notify_all();
        }

        fn text(&self) -> String {
            String::from_utf8(self.0.0.lock().unwrap().written.clone()).unwrap()
        }
    }

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let guard = self.0.0.lock().unwrap();
            let mut guard = self.0.1.wait_while(guard, |state| !state.open).unwrap();
            guard.written.extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    const DEADLINE: Duration = Duration::from_secs(20);

    #[test]
    fn lines_come_out_in_order() {
        let gate = Gate::default();
        gate.open();
        let writer = LineWriter::spawn(LogFormat::Logfmt, Box::new(gate.clone())).unwrap();
        for n in 0..1000 {
            writer.send(format!("{n}\n"));
        }
        writer.flush(DEADLINE);
        assert_eq!(gate.text(), (0..1000).map(|n| format!("{n}\n")).collect::<String>());
    }

    #[test]
    fn a_reader_that_stalls_costs_lines_and_never_time() {
        let gate = Gate::default();
        let writer = LineWriter::spawn(LogFormat::Logfmt, Box::new(gate.clone())).unwrap();
        let line = format!("{}\n", "x".repeat(1023));
        let total = 3 * QUEUE as u64;
        for _ in 0..total {
            writer.send(line.clone());
        }
        let lost = writer.lost();
        assert!(lost > 0 && lost < total, "{lost}");
        gate.open();
        writer.flush(DEADLINE);
        let text = gate.text();
        assert!(text.contains(&format!(" access-log-lost lines={lost}\n")));
        assert_eq!(text.matches(&line).count() as u64, total - lost);
    }

    #[test]
    fn an_output_that_fails_is_counted() {
        struct Broken;
        impl Write for Broken {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let writer = LineWriter::spawn(LogFormat::Json, Box::new(Broken)).unwrap();
        writer.send("x\n".into());
        writer.flush(DEADLINE);
        assert!(writer.lost() >= 1);
    }
}
