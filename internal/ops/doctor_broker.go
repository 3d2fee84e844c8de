package ops

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/lapse-orders/lapse/internal/rmq"
	"github.com/lapse-orders/lapse/internal/rmq/admin"
)

// The retries of a group that the stack makes, and which an outage of some hours needs: each delivery that a consumer cannot finish in
// time counts as one.
const leastRetries = 16

func (d *doctor) openProbe(context.Context) (*rmq.Probe, error) {
	p, err := rmq.NewProbe(d.cfg.RocketMQ)
	if err == nil {
		d.onEnd(p.Close)
	}
	return p, err
}

// answers is what the proxy says to the questions that several checks ask.
type answers struct {
	topicTypes []string
	topicErr   error
	attempts   int
	groupErr   error
}

// ask asks for the topic and the group of the timed messages.
func (d *doctor) ask(ctx context.Context) (*answers, error) {
	p, err := d.probe(ctx)
	if err != nil {
		return nil, err
	}
	a := &answers{}
	var both sync.WaitGroup
	both.Go(func() { a.topicTypes, a.topicErr = topicTypes(ctx, p, d.cfg.Topic) })
	both.Go(func() { a.attempts, a.groupErr = attempts(ctx, p, d.cfg.Group, d.cfg.Topic) })
	both.Wait()
	return a, nil
}

// topicTypes asks twice before it believes that a topic is not there: what the proxy has said before it says once more, and looks only then.
func topicTypes(ctx context.Context, p *rmq.Probe, topic string) ([]string, error) {
	types, err := p.TopicTypes(ctx, topic)
	if rmq.IsNoTopic(err) && pause(ctx, time.Second) == nil {
		types, err = p.TopicTypes(ctx, topic)
	}
	return types, err
}

// attempts asks how often a group delivers a message.
func attempts(ctx context.Context, p *rmq.Probe, group, topic string) (int, error) {
	v, err := p.Visit(ctx, group, topic)
	if err != nil {
		return 0, err
	}
	v.Leave()
	return v.Attempts, nil
}

// onBroker makes a check of one that needs the proxy's answers.
func onBroker(run func(ctx context.Context, d *doctor, p *rmq.Probe, a *answers) result) func(context.Context, *doctor) result {
	return func(ctx context.Context, d *doctor) result {
		p, err := d.probe(ctx)
		if err != nil {
			return wrong("correct the section rocketmq of the configuration", "%v", err)
		}
		a, err := d.answers(ctx)
		if err != nil {
			return unchecked("", "the proxy does not answer, see broker.reachable and broker.tls")
		}
		return run(ctx, d, p, a)
	}
}

// silent says that nobody answered, rather than refused.
func silent(err error) bool {
	if err == nil || rmq.IsNoGroup(err) {
		return false
	}
	_, refused := rmq.Code(err)
	return !refused
}

func (d *doctor) brokerSettings(ctx context.Context) (map[string]string, error) {
	return admin.New(d.cfg.AdminEndpoint).BrokerConfig(ctx)
}

// inAdmin is the name under which the broker itself knows a topic or a group: the namespace is a prefix there.
func (d *doctor) inAdmin(name string) string {
	if d.cfg.RocketMQ.Namespace == "" {
		return name
	}
	return d.cfg.RocketMQ.Namespace + "%" + name
}

const noAdmin = "set LAPSE_ROCKETMQ_ADMIN_ENDPOINT to host:port of the broker (listenPort, 10911)"

// withSettings makes a check of one that reads the broker's settings.
func withSettings(run func(ctx context.Context, d *doctor, settings map[string]string) result) func(context.Context, *doctor) result {
	return func(ctx context.Context, d *doctor) result {
		if d.cfg.AdminEndpoint == "" {
			return unchecked(noAdmin+"; or look yourself: mqadmin getBrokerConfig -b HOST:10911", "rocketmq.admin_endpoint is not set")
		}
		settings, err := d.settings(ctx)
		if err != nil {
			return unchecked("", "%v", err)
		}
		return run(ctx, d, settings)
	}
}

func createTopic(name string, kind admin.TopicType) string {
	return fmt.Sprintf("mqadmin updateTopic -n NAMESERVER:9876 -c DefaultCluster -t %s -r 8 -w 8 -a +message.type=%s", name, kind)
}

func createGroup(name string, retries int) string {
	return fmt.Sprintf("mqadmin updateSubGroup -n NAMESERVER:9876 -c DefaultCluster -g %s -r %d", name, retries)
}

var brokerChecks = []check{
	{
		name: "broker.reachable",
		why:  "Orders are placed without the broker, but cancelled on time only with it; with several endpoints each may be the one that is used.",
		run: func(ctx context.Context, d *doctor) result {
			p, err := d.probe(ctx)
			if err != nil {
				return wrong("correct the section rocketmq of the configuration", "%v", err)
			}
			var bad []string
			for _, endpoint := range p.Endpoints() {
				ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
				var dialer net.Dialer
				conn, err := dialer.DialContext(ctx, "tcp", endpoint)
				cancel()
				if err != nil {
					bad = append(bad, fmt.Sprintf("%s: %v", endpoint, err))
					continue
				}
				_ = conn.Close()
			}
			if len(bad) > 0 {
				return wrong("set LAPSE_ROCKETMQ_ENDPOINTS to host:port of the gRPC proxy (8081), or start it", "%s", strings.Join(bad, "; "))
			}
			return sound("%s", strings.Join(p.Endpoints(), ", "))
		},
	},
	{
		name: "broker.tls",
		why:  "With the wrong side speaking TLS nothing connects, and without a verified certificate whoever sits between can forge messages.",
		run: onBroker(func(ctx context.Context, d *doctor, p *rmq.Probe, a *answers) result {
			if d.cfg.RocketMQ.TLS.Disabled {
				if a.topicErr != nil && strings.Contains(a.topicErr.Error(), "if the server speaks TLS") {
					return wrong("set LAPSE_ROCKETMQ_TLS_ENABLED=true", "off, and the server speaks TLS only")
				}
				if silent(a.topicErr) {
					return unchecked("", "%v", a.topicErr)
				}
				return sound("off: plaintext, as rocketmq.tls.enabled=false says")
			}
			var found []string
			for _, endpoint := range p.Endpoints() {
				state, err := p.Handshake(ctx, endpoint)
				if err != nil {
					return tlsProblem(endpoint, err)
				}
				leaf := state.PeerCertificates[0]
				verified := "verified"
				if d.cfg.RocketMQ.TLS.InsecureSkipVerify {
					return wrong("set LAPSE_ROCKETMQ_TLS_INSECURE_SKIP_VERIFY=false, and LAPSE_ROCKETMQ_TLS_CA_FILE to the issuer's PEM file", "%s: the certificate is not verified (rocketmq.tls.insecure_skip_verify)", endpoint)
				}
				found = append(found, fmt.Sprintf("%s: %s, certificate %s until %s", endpoint, tls.VersionName(state.Version), verified, leaf.NotAfter.UTC().Format(time.DateOnly)))
			}
			return sound("%s", strings.Join(found, "; "))
		}),
	},
	{
		name: "broker.credentials",
		why:  "With credentials that are refused nothing is sent or received; orders wait in the outbox.",
		run: onBroker(func(_ context.Context, d *doctor, _ *rmq.Probe, a *answers) result {
			key := d.cfg.RocketMQ.AccessKey
			for _, err := range []error{a.topicErr, a.groupErr} {
				if rmq.IsNoRight(err) {
					if key == "" {
						return wrong("set LAPSE_ROCKETMQ_ACCESS_KEY and LAPSE_ROCKETMQ_SECRET_KEY_FILE", "none are given, and the server asks for them: %v", err)
					}
					return wrong("check rocketmq.access_key and rocketmq.secret_key, and the rights: mqadmin getUser, mqadmin listAcl", "refused for %s: %v", key, err)
				}
			}
			if silent(a.topicErr) {
				return unchecked("", "the proxy does not answer: %v", a.topicErr)
			}
			if key == "" {
				return sound("none are given and none are asked for")
			}
			return sound("accepted for %s", key)
		}),
	},
	{
		name: "broker.topic",
		why:  "Only a topic of type DELAY takes timed messages; one that the broker makes by itself is NORMAL and refuses them for good.",
		run: onBroker(func(_ context.Context, d *doctor, _ *rmq.Probe, a *answers) result {
			fix := createTopic(d.cfg.Topic, admin.Delay)
			switch {
			case rmq.IsNoTopic(a.topicErr):
				return wrong(fix, "%s is not there", d.cfg.Topic)
			case a.topicErr != nil:
				return unchecked("", "%v", a.topicErr)
			case !slices.Contains(a.topicTypes, rmq.TopicDelay):
				return wrong(fix, "%s is of type %s", d.cfg.Topic, strings.Join(a.topicTypes, "+"))
			}
			return sound("%s, DELAY", d.cfg.Topic)
		}),
	},
	{
		name: "broker.group",
		why:  "A message goes to the dead letters after as many deliveries as the group allows: with few, an outage of minutes is enough.",
		run: onBroker(func(_ context.Context, d *doctor, _ *rmq.Probe, a *answers) result {
			fix := createGroup(d.cfg.Group, leastRetries)
			switch {
			case rmq.IsNoGroup(a.groupErr):
				return wrong(fix, "%s is not there", d.cfg.Group)
			case a.groupErr != nil:
				return unchecked("", "%v", a.groupErr)
			case a.attempts-1 < leastRetries:
				return wrong(fix, "%s has %d retries, fewer than %d", d.cfg.Group, a.attempts-1, leastRetries)
			}
			return sound("%s, %d retries", d.cfg.Group, a.attempts-1)
		}),
	},
	{
		name: "broker.dead_letters",
		why:  "A dead letter keeps the count of its deliveries: a reader with less than two retries more than the group never sees it.",
		run: onBroker(func(ctx context.Context, d *doctor, p *rmq.Probe, a *answers) result {
			reader := d.cfg.Group + "-dlq"
			got, err := attempts(ctx, p, reader, "%DLQ%"+d.cfg.Group)
			switch {
			case rmq.IsNoGroup(err):
				return wrong(createGroup(reader, 1000), "%s is not there", reader)
			case err != nil:
				return unchecked("", "%v", err)
			case a.groupErr == nil && got-1 < a.attempts-1+2:
				return wrong(createGroup(reader, 1000), "%s has %d retries, and %s has %d", reader, got-1, d.cfg.Group, a.attempts-1)
			}
			return sound("%s, %d retries", reader, got-1)
		}),
	},
	{
		name: "broker.events_topic",
		why:  "Events are ordinary messages: a topic of another type refuses them.",
		run: onBroker(func(ctx context.Context, d *doctor, p *rmq.Probe, _ *answers) result {
			topic := d.cfg.EventsTopic
			if topic == "" {
				return unchecked("", "events.topic is not set: no events are sent")
			}
			types, err := topicTypes(ctx, p, topic)
			switch {
			case rmq.IsNoTopic(err):
				return wrong(createTopic(topic, admin.Normal), "%s is not there", topic)
			case err != nil:
				return unchecked("", "%v", err)
			case !slices.Contains(types, rmq.TopicNormal):
				return wrong(createTopic(topic, admin.Normal), "%s is of type %s", topic, strings.Join(types, "+"))
			}
			return sound("%s, NORMAL", topic)
		}),
	},
	{
		name: "broker.offsets",
		why:  "A group without a place on a topic that has lost its first messages starts at the end and misses what is pending, without a word.",
		run: func(ctx context.Context, d *doctor) result {
			group, topic := d.inAdmin(d.cfg.Group), d.inAdmin(d.cfg.Topic)
			if d.cfg.AdminEndpoint == "" {
				return unchecked(noAdmin+"; or look yourself: mqadmin consumerProgress -n NAMESERVER:9876 -g "+group, "rocketmq.admin_endpoint is not set")
			}
			offsets, err := admin.New(d.cfg.AdminEndpoint).Offsets(ctx, group, topic)
			if err != nil {
				return unchecked("", "%v", err)
			}
			return judgeOffsets(offsets, fmt.Sprintf("mqadmin resetOffsetByTime -n NAMESERVER:9876 -g %s -t %s -s 0", group, topic))
		},
	},
	{
		name: "broker.settings",
		why:  "Several of RocketMQ's defaults lose timed messages: on a full disk, at a power loss, or when a due message cannot be written at once.",
		run: withSettings(func(_ context.Context, _ *doctor, settings map[string]string) result {
			errs := []error{admin.CheckSettings(settings)}
			if flush := settings["flushDiskType"]; flush != "SYNC_FLUSH" && settings["brokerRole"] != "SYNC_MASTER" {
				errs = append(errs, fmt.Errorf("flushDiskType=%q, want \"SYNC_FLUSH\"", flush))
			}
			if err := errors.Join(errs...); err != nil {
				return wrong("set them in broker.conf as configs/rocketmq/broker.conf does, and restart the broker; then: mqadmin getBrokerConfig -b HOST:10911", "%s", strings.ReplaceAll(err.Error(), "\n", "; "))
			}
			return sound("none that loses messages is in force")
		}),
	},
	{
		name: "broker.retention",
		why:  "Pending messages live in files that the broker deletes by age and by the fill of its disk; a file that is gone takes its messages along.",
		run: withSettings(func(ctx context.Context, d *doctor, settings map[string]string) result {
			hours, err := strconv.Atoi(settings["fileReservedTime"])
			if err != nil {
				return failed("read fileReservedTime", err)
			}
			// Twice: the longest delay, and an outage as long.
			if least := 2 * d.cfg.MaxDelay; time.Duration(hours)*time.Hour < least {
				return wrong("fileReservedTime="+strconv.Itoa(int(least.Hours())+1)+" in broker.conf, and restart the broker; or a shorter relay.max_delay", "files are kept for %d h; relay.max_delay is %s, and an outage as long comes on top", hours, d.cfg.MaxDelay)
			}
			figures, err := admin.New(d.cfg.AdminEndpoint).RuntimeInfo(ctx)
			if err != nil {
				return failed("read the fill of the disk", err)
			}
			ratio, err := strconv.ParseFloat(figures["commitLogDiskRatio"], 64)
			if err != nil {
				return failed("read the fill of the disk", err)
			}
			if ratio > 0.75 {
				return wrong("make room on the broker's disk", "the disk is %.0f %% full: young files go soon, or writes are refused", 100*ratio)
			}
			return sound("files are kept for %d h; the disk is %.0f %% full", hours, 100*ratio)
		}),
	},
}

// tlsProblem says which side is wrong.
func tlsProblem(endpoint string, err error) result {
	var (
		record   tls.RecordHeaderError
		unknown  x509.UnknownAuthorityError
		hostname x509.HostnameError
		op       *net.OpError
	)
	switch {
	case errors.As(err, &record):
		return wrong("set LAPSE_ROCKETMQ_TLS_ENABLED=false if plaintext is meant", "%s does not speak TLS: %v", endpoint, err)
	case errors.As(err, &unknown):
		return wrong("set LAPSE_ROCKETMQ_TLS_CA_FILE to the PEM file of the issuer", "%s: %v", endpoint, err)
	case errors.As(err, &hostname):
		return wrong("set LAPSE_ROCKETMQ_TLS_SERVER_NAME to a name in the certificate", "%s: %v", endpoint, err)
	case errors.As(err, &op) && op.Op == "dial":
		return unchecked("", "%s does not answer, see broker.reachable", endpoint)
	case errors.Is(err, context.DeadlineExceeded):
		return unchecked("", "%s: no handshake in time", endpoint)
	}
	return wrong("look at the proxy's TLS settings and its log", "%s: %v", endpoint, err)
}

// judgeOffsets looks at the places of a group on a topic.
func judgeOffsets(offsets []admin.QueueOffsets, fix string) result {
	var bad []string
	lag, fresh := int64(0), 0
	for _, o := range offsets {
		switch {
		case o.Committed > o.Max:
			bad = append(bad, fmt.Sprintf("queue %d ends at %d and the group is at %d: it misses what comes until then", o.Queue, o.Max, o.Committed))
		case o.Committed < 0 && o.Min > 0:
			bad = append(bad, fmt.Sprintf("queue %d has lost its first %d messages and the group has no place there: it starts at the end", o.Queue, o.Min))
		case o.Committed < 0 && o.Max > 0:
			fresh++
		case o.Committed >= 0 && o.Committed < o.Min:
			bad = append(bad, fmt.Sprintf("queue %d has lost messages up to %d and the group was at %d: 'lapse reconcile --once' finds their orders", o.Queue, o.Min, o.Committed))
		case o.Committed >= 0:
			lag += o.Max - o.Committed
		}
	}
	switch {
	case len(bad) > 0:
		return wrong(fix, "%s", strings.Join(bad, "; "))
	case fresh > 0:
		return sound("%d queues; in %d the group is new, and their first message is still there", len(offsets), fresh)
	}
	return sound("%d queues, %d messages to receive", len(offsets), lag)
}
