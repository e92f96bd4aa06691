//! Random objects: decided like a plain reading of their JSON, and never more widely after damage.

use serde_json::{Value, json};

use super::*;

const SOURCES: [Option<&str>; 4] = [WEB, CART, OTHER, NONE];
const IPS: [&str; 2] = ["10.0.0.9", "fd00::9"];
const PORTS: [u16; 3] = [1, 2, 3];
const LABELS: [&[(&str, &str)]; 3] = [&[], &[("app", "cart")], &[("app", "web")]];

fn pick(rng: &mut fastrand::Rng, values: &[&str]) -> Value {
    let count = rng.usize(1..=2);
    (0..count).map(|_| json!(rng.choice(values).unwrap())).collect()
}

fn seldom(rng: &mut fastrand::Rng, object: &mut Value, fields: &[(&str, &[&str])]) {
    for (field, values) in fields {
        if rng.u8(..4) == 0 {
            object[*field] = pick(rng, values);
        }
    }
    if object.as_object().unwrap().is_empty() {
        let (field, values) = rng.choice(fields).unwrap();
        object[*field] = pick(rng, values);
    }
}

const PRINCIPALS: &[&str] = &["*", "cluster.local/ns/shop/sa/web", "cluster.local/ns/b*", "*/sa/web"];
const NAMESPACES: &[&str] = &["*", "shop", "b*", "*k"];
const BLOCKS: &[&str] = &["10.0.0.0/24", "fd00::/8", "10.0.0.9", "0.0.0.0/0"];
const NUMBERS: &[&str] = &["1", "2", "3"];

fn random_rule(rng: &mut fastrand::Rng) -> Value {
    let mut rule = json!({});
    if rng.bool() {
        let count = rng.usize(1..=2);
        let sources = (0..count).map(|_| {
            let mut source = json!({});
            let fields = [
                ("principals", PRINCIPALS),
                ("notPrincipals", PRINCIPALS),
                ("namespaces", NAMESPACES),
                ("notNamespaces", NAMESPACES),
                ("ipBlocks", BLOCKS),
                ("notIpBlocks", BLOCKS),
            ];
            seldom(rng, &mut source, &fields);
            json!({"source": source})
        });
        rule["from"] = sources.collect();
    }
    if rng.bool() {
        let mut operation = json!({});
        seldom(rng, &mut operation, &[("ports", NUMBERS), ("notPorts", NUMBERS)]);
        rule["to"] = json!([{"operation": operation}]);
    }
    if rng.u8(..3) == 0 {
        let keys: [(&str, &[&str]); 4] = [
            ("source.principal", PRINCIPALS),
            ("source.namespace", NAMESPACES),
            ("source.ip", BLOCKS),
            ("destination.port", NUMBERS),
        ];
        let (key, values) = rng.choice(&keys).unwrap();
        let mut condition = json!({});
        seldom(rng, &mut condition, &[("values", values), ("notValues", values)]);
        condition["key"] = json!(key);
        rule["when"] = json!([condition]);
    }
    rule
}

fn random_spec(rng: &mut fastrand::Rng) -> Value {
    let action = *rng.choice(&["ALLOW", "DENY"]).unwrap();
    let least = usize::from(action == "DENY");
    let count = rng.usize(least..=2);
    let rules: Vec<_> = (0..count).map(|_| random_rule(rng)).collect();
    let mut spec = json!({"action": action, "rules": rules});
    if rng.bool() {
        spec["selector"] = json!({"matchLabels": {"app": "cart"}});
    }
    spec
}

/// What the documentation of the API says, read from the JSON.
mod plain {
    use super::*;

    pub(super) fn admits(specs: &[(String, Value)], labels: &[(&str, &str)], asks: &Asks<'_>) -> bool {
        let selected = |spec: &&(String, Value)| {
            let wants = &spec.1["selector"]["matchLabels"]["app"];
            wants.is_null() || labels.iter().any(|(_, value)| wants == value)
        };
        let mine: Vec<_> = specs.iter().filter(|spec| spec.0 != "bank").filter(selected).collect();
        let of = |action: &str| {
            mine.iter()
                .filter(|spec| spec.1["action"] == action)
                .collect::<Vec<_>>()
        };
        let hit = |spec: &Value| list(&spec["rules"]).iter().any(|rule| rule_hit(rule, asks));
        !of("DENY").iter().any(|spec| hit(&spec.1))
            && (of("ALLOW").is_empty() || of("ALLOW").iter().any(|spec| hit(&spec.1)))
    }

    pub(super) struct Asks<'a> {
        pub(super) source: Option<&'a str>,
        pub(super) ip: &'a str,
        pub(super) port: u16,
    }

    fn list(value: &Value) -> Vec<Value> {
        value.as_array().cloned().unwrap_or_default()
    }

    fn rule_hit(rule: &Value, asks: &Asks<'_>) -> bool {
        let from = list(&rule["from"]);
        let to = list(&rule["to"]);
        (from.is_empty() || from.iter().any(|from| source_hit(&from["source"], asks)))
            && (to.is_empty()
                || to
                    .iter()
                    .any(|to| both(&to["operation"], "ports", "notPorts", |v| port(v, asks))))
            && list(&rule["when"]).iter().all(|when| {
                both(when, "values", "notValues", |value| {
                    match when["key"].as_str().unwrap() {
                        "source.principal" => text(value, asks.source),
                        "source.namespace" => text(value, namespace(asks)),
                        "source.ip" => block(value, asks.ip),
                        _ => port(value, asks),
                    }
                })
            })
    }

    fn source_hit(source: &Value, asks: &Asks<'_>) -> bool {
        both(source, "principals", "notPrincipals", |value| text(value, asks.source))
            && both(source, "namespaces", "notNamespaces", |value| {
                text(value, namespace(asks))
            })
            && both(source, "ipBlocks", "notIpBlocks", |value| block(value, asks.ip))
    }

    fn both(object: &Value, any: &str, none: &str, hit: impl Fn(&str) -> bool) -> bool {
        let any = list(&object[any]);
        let hit = |value: &Value| hit(value.as_str().unwrap());
        (any.is_empty() || any.iter().any(hit)) && !list(&object[none]).iter().any(hit)
    }

    fn namespace<'a>(asks: &Asks<'a>) -> Option<&'a str> {
        asks.source.map(|source| source.split('/').nth(2).unwrap())
    }

    fn text(pattern: &str, is: Option<&str>) -> bool {
        let Some(is) = is else { return false };
        match pattern.find('*') {
            None => pattern == is,
            Some(0) => is.ends_with(&pattern[1..]),
            Some(end) => is.starts_with(&pattern[..end]),
        }
    }

    fn block(block: &str, ip: &str) -> bool {
        match (block, ip) {
            ("fd00::/8", ip) => ip.starts_with("fd"),
            (_, ip) => ip.starts_with("10."),
        }
    }

    fn port(value: &str, asks: &Asks<'_>) -> bool {
        value == asks.port.to_string()
    }
}

fn case_of(specs: &[(String, Value)]) -> Case {
    let mut case = Case::new();
    for (index, (namespace, spec)) in specs.iter().enumerate() {
        case.add(namespace, &format!("p{index}"), spec.clone());
    }
    case
}

fn random_specs(rng: &mut fastrand::Rng) -> Vec<(String, Value)> {
    let count = rng.usize(1..=3);
    let namespaces = ["shop", "shop", ROOT, "bank"];
    (0..count)
        .map(|_| (rng.choice(namespaces).unwrap().to_owned(), random_spec(rng)))
        .collect()
}

#[test]
fn decided_like_a_plain_reading_of_the_objects() {
    let mut rng = fastrand::Rng::with_seed(0xad17);
    let mut counts = [0, 0];
    for _ in 0..1_500 {
        let specs = random_specs(&mut rng);
        let case = case_of(&specs);
        for labels in LABELS {
            let to = case.destination("shop", labels);
            for (source, ip, port) in asked() {
                let expected = plain::admits(&specs, labels, &plain::Asks { source, ip, port });
                assert_eq!(
                    case.admits(&to, source, ip, port),
                    expected,
                    "{specs:#?} {labels:?} {source:?} {ip} {port}"
                );
                counts[usize::from(expected)] += 1;
            }
        }
    }
    assert!(
        counts.iter().all(|count| *count > 10_000),
        "both outcomes are met: {counts:?}"
    );
}

fn asked() -> impl Iterator<Item = (Option<&'static str>, &'static str, u16)> {
    let of_source = |source| {
        IPS.into_iter()
            .flat_map(move |ip| PORTS.map(move |port| (source, ip, port)))
    };
    SOURCES.into_iter().flat_map(of_source)
}

/// Damages one place of a specification.
fn damage(rng: &mut fastrand::Rng, spec: &mut Value) {
    let mut places = Vec::new();
    collect(spec, String::new(), &mut places);
    let place = rng.choice(&places).unwrap();
    let target = spec.pointer_mut(place).unwrap();
    let strange = [
        json!("a*b"),
        json!("*x*"),
        json!(""),
        json!(7),
        json!("spiffe://a"),
        json!({"x": [1]}),
        json!([null]),
        json!([["x"]]),
        json!(true),
    ];
    match target {
        Value::Object(fields) => {
            let field = *rng
                .choice(&["paths", "hosts", "requestPrincipals", "unheardOf", "remoteIpBlocks"])
                .unwrap();
            fields.insert(field.to_owned(), json!(["x"]));
        }
        Value::Array(values) => values.push(rng.choice(&strange).unwrap().clone()),
        other => *other = rng.choice(&strange).unwrap().clone(),
    }
}

/// Pointers to all that can be damaged. An action that reads AUDIT would be another policy, not a damaged one.
fn collect(value: &Value, path: String, places: &mut Vec<String>) {
    places.push(path.clone());
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| {
            collect(
                value,
                format!("{path}/{}", name.replace('~', "~0").replace('/', "~1")),
                places,
            )
        }),
        Value::Array(values) => values
            .iter()
            .enumerate()
            .for_each(|(index, value)| collect(value, format!("{path}/{index}"), places)),
        _ => {}
    }
}

#[test]
fn a_damaged_policy_never_admits_more() {
    let mut rng = fastrand::Rng::with_seed(0x5afe);
    let mut narrowed = 0;
    for _ in 0..4_000 {
        let sound = random_specs(&mut rng);
        let mut damaged = sound.clone();
        let index = rng.usize(..damaged.len());
        damage(&mut rng, &mut damaged[index].1);
        let (before, after) = (case_of(&sound), case_of(&damaged));
        for labels in LABELS {
            let (to_before, to_after) = (before.destination("shop", labels), after.destination("shop", labels));
            for (source, ip, port) in asked() {
                let (was, is) = (
                    before.admits(&to_before, source, ip, port),
                    after.admits(&to_after, source, ip, port),
                );
                let harmless = selects_others(&sound[index].1, &damaged[index].1);
                assert!(
                    was || !is || harmless,
                    "{:#} became {:#}: {labels:?} {source:?} {ip} {port}",
                    sound[index].1,
                    damaged[index].1
                );
                narrowed += usize::from(was && !is);
            }
        }
    }
    assert!(narrowed > 10_000, "{narrowed}");
}

/// Whether the damage made a sound selector of other pods of it, which is another policy.
fn selects_others(sound: &Value, damaged: &Value) -> bool {
    sound["selector"] != damaged["selector"]
}
