//! What the access log says of a connection.

use std::fmt::{self, Display};
use std::time::SystemTime;

use serde_json::{Value, json};

use super::line::{LogFormat, Record, Rfc3339};
use super::reporter_name;
use crate::dataplane::record::{Connection, End, Peer};

/// Room for a line of usual length, so that it is allocated once.
const USUAL_LENGTH: usize = 1024;

/// The line that tells of a connection's end, with its newline.
pub fn access_line(format: LogFormat, time: SystemTime, connection: &Connection, end: &End) -> String {
    let mut line = String::with_capacity(USUAL_LENGTH);
    let mut record = Record::begin(&mut line, format, time);
    record.event("access");
    parties(&mut record, connection);
    let (sent, received) = connection.bytes();
    record.number("bytes_sent", sent);
    record.number("bytes_received", received);
    record.milliseconds("duration_ms", end.duration);
    if let Some(author) = &connection.author {
        record.number("pid", u64::from(author.pid));
        record.text("command", &author.command);
        record.number("cgroup", author.cgroup);
    }
    if let Some(measured) = &end.measured {
        record.milliseconds("rtt_ms", measured.round_trip);
        record.number("retransmits", u64::from(measured.retransmits));
    }
    record.option("certificate", connection.certificate_serial.as_ref().map(as_display));
    record.text("closed_by", end.by.as_str());
    record.text("phase", end.phase.as_str());
    record.text("how", end.how.as_str());
    record.option("detail", end.how.detail().as_ref().map(as_display));
    record.end();
    line
}

/// The line that tells of a refusal that a policy in dry-run mode would have made, with its newline.
pub fn dry_run_line(format: LogFormat, time: SystemTime, connection: &Connection, rule: &str) -> String {
    let mut line = String::with_capacity(USUAL_LENGTH);
    let mut record = Record::begin(&mut line, format, time);
    record.event("dry-run");
    parties(&mut record, connection);
    record.text("detail", rule);
    record.end();
    line
}

fn parties(record: &mut Record<'_>, connection: &Connection) {
    record.text("reporter", reporter_name(connection.reporter));
    record.text("path", connection.path.as_str());
    let Connection {
        source, destination, ..
    } = connection;
    peer(record, ["source.addr", "source.workload", "source.identity"], source);
    peer(
        record,
        ["destination.addr", "destination.workload", "destination.identity"],
        destination,
    );
    if let Some(service) = &connection.service {
        record.value("service", &Named(&service.namespace, &service.name));
    }
    record.option("tunnel", connection.tunnel.as_ref().map(as_display));
}

fn peer(record: &mut Record<'_>, [addr, workload, identity]: [&str; 3], peer: &Peer) {
    record.option(addr, peer.addr.as_ref().map(as_display));
    if let Some(known) = &peer.workload {
        record.value(workload, &Named(&known.namespace, &known.name));
    }
    record.option(identity, peer.identity.as_ref().map(as_display));
}

fn as_display<T: Display>(value: &T) -> &dyn Display {
    value
}

/// `namespace/name`.
struct Named<'a>(&'a str, &'a str);

impl Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.0, self.1)
    }
}

/// An open connection, for the state query.
pub(super) fn live_json(connection: &Connection, now: SystemTime) -> Value {
    let (sent, received) = connection.bytes();
    let named = |namespace: &str, name: &str| format!("{namespace}/{name}");
    let peer = |peer: &Peer| {
        json!({
            "addr": peer.addr,
            "workload": peer.workload.as_ref().map(|known| named(&known.namespace, &known.name)),
            "identity": peer.identity,
        })
    };
    json!({
        "id": connection.id,
        "opened": Rfc3339(connection.opened).to_string(),
        "age_ms": now.duration_since(connection.opened).unwrap_or_default().as_millis() as u64,
        "reporter": reporter_name(connection.reporter),
        "path": connection.path.as_str(),
        "source": peer(&connection.source),
        "destination": peer(&connection.destination),
        "service": connection.service.as_ref().map(|service| named(&service.namespace, &service.name)),
        "tunnel": connection.tunnel,
        "certificate": connection.certificate_serial,
        "author": connection.author.as_ref().map(|author| json!({
            "pid": author.pid,
            "command": author.command,
            "cgroup": author.cgroup,
        })),
        "bytes_sent": sent,
        "bytes_received": received,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataplane::record::{Author, How, Party, Path, Phase, Reporter};
    use crate::telemetry::tests::{connection, end};
    use std::time::{Duration, UNIX_EPOCH};

    #[test]
    fn a_line_has_all_that_is_known_in_a_fixed_order() {
        let mut connection = connection(7);
        connection.author = Some(Author {
            pid: 42,
            command: "curl".into(),
            cgroup: 99,
        });
        connection.tunnel = Some("192.0.2.9:15008".parse().unwrap());
        connection.certificate_serial = Some("0a1b".into());
        connection.sent = 10.into();
        connection.received = 20.into();
        let end = End {
            duration: Duration::from_micros(1500),
            ..end(Party::Source, Phase::Relay, How::Fin)
        };
        let line = access_line(LogFormat::Logfmt, UNIX_EPOCH, &connection, &end);
        assert_eq!(
            line,
            "time=1970-01-01T00:00:00.000Z access reporter=source path=hbone source.addr=10.0.0.1:40000 \
             source.workload=shop/cart-1 source.identity=spiffe://cluster.local/ns/shop/sa/cart \
             destination.addr=10.1.0.1:80 destination.workload=pay/bank-1 \
             destination.identity=spiffe://cluster.local/ns/pay/sa/bank service=pay/bank tunnel=192.0.2.9:15008 \
             bytes_sent=10 bytes_received=20 duration_ms=1.500 pid=42 command=curl cgroup=99 certificate=0a1b \
             closed_by=source phase=relay how=fin\n"
        );
        assert!(line.len() <= USUAL_LENGTH);
        let json = access_line(LogFormat::Json, UNIX_EPOCH, &connection, &end);
        let value: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["event"], "access");
        assert_eq!(value["source.workload"], "shop/cart-1");
        assert_eq!(value["bytes_received"], 20);
    }

    #[test]
    fn what_is_not_known_is_left_out() {
        let mut connection = connection(7);
        connection.reporter = Reporter::Destination;
        connection.path = Path::Plain;
        connection.source = Peer {
            addr: connection.source.addr,
            ..Peer::default()
        };
        connection.destination = Peer::default();
        connection.service = None;
        let end = end(Party::Proxy, Phase::Decide, How::Policy("deny: a/b rule 2".into()));
        assert_eq!(
            access_line(LogFormat::Logfmt, UNIX_EPOCH, &connection, &end),
            "time=1970-01-01T00:00:00.000Z access reporter=destination path=plain source.addr=10.0.0.1:40000 \
             bytes_sent=0 bytes_received=0 duration_ms=0.000 closed_by=proxy phase=decide how=policy \
             detail=\"deny: a/b rule 2\"\n"
        );
    }

    #[test]
    fn a_hostile_command_name_or_reason_stays_in_its_place() {
        let evil = "x\" how=fin\ntime=1970-01-01T00:00:00.000Z access \u{1b}]0;\u{7}";
        let mut connection = connection(7);
        connection.author = Some(Author {
            pid: 1,
            command: evil.into(),
            cgroup: 1,
        });
        let end = end(Party::Destination, Phase::Connect, How::Refused(evil.into()));
        let line = access_line(LogFormat::Logfmt, UNIX_EPOCH, &connection, &end);
        assert_eq!(line.matches('\n').count(), 1);
        assert!(!line.trim_end().contains(char::is_control), "{line:?}");
        let escaped = "\"x\\\" how=fin\\ntime=1970-01-01T00:00:00.000Z access \\u001b]0;\\u0007\"";
        assert!(line.contains(&format!(" command={escaped} cgroup=1 ")), "{line}");
        assert!(line.ends_with(&format!(" how=refused detail={escaped}\n")), "{line}");
        let json = access_line(LogFormat::Json, UNIX_EPOCH, &connection, &end);
        let value: Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&value["command"], &value["detail"]), (&json!(evil), &json!(evil)));
    }

    #[test]
    fn a_dry_run_names_the_rule() {
        let line = dry_run_line(LogFormat::Logfmt, UNIX_EPOCH, &connection(7), "deny: a/b rule 1");
        assert!(
            line.starts_with("time=1970-01-01T00:00:00.000Z dry-run reporter=source "),
            "{line}"
        );
        assert!(
            line.ends_with(" service=pay/bank detail=\"deny: a/b rule 1\"\n"),
            "{line}"
        );
    }
}
