package rmq

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	golang "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
	"github.com/apache/rocketmq-clients/golang/v5/pkg/utils"
	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Probe asks the servers single questions, for whoever wants to know what is wrong with them. A Producer and a Consumer hide their faults
// and wait; a Probe makes one attempt and says what came of it. It also sees what the official client keeps to itself: how often a group
// delivers, and when the broker stored a message. It is safe for concurrent use.
type Probe struct {
	c    *connector[golang.Producer] // its parts, without a client: nothing runs in the background
	conf *golang.Config
}

// NewProbe validates and dials nothing. The error is one of configuration. Close must be called.
func NewProbe(cfg Config) (*Probe, error) {
	cfg = cfg.WithDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	endpoints, err := utils.ParseTarget(cfg.Endpoints)
	if err != nil {
		return nil, err
	}
	l, err := newLink(cfg, v2.ClientType_SIMPLE_CONSUMER, "")
	if err != nil {
		return nil, err
	}
	p := &Probe{
		c:    &connector[golang.Producer]{cfg: cfg, link: l, endpoints: endpoints, access: accessTargets(endpoints)},
		conf: &golang.Config{Endpoint: cfg.Endpoints, NameSpace: cfg.Namespace},
	}
	if cfg.AccessKey != "" {
		p.conf.Credentials = &credentials.SessionCredentials{AccessKey: cfg.AccessKey, AccessSecret: cfg.SecretKey, SecurityToken: cfg.SecurityToken}
	}
	identity, err := p.identity()
	if err != nil {
		l.close()
		return nil, err
	}
	l.setSigner(identity.Sign)
	return p, nil
}

// identity is the name and the signature of a client that is never started.
func (p *Probe) identity() (golang.Client, error) {
	identity, err := golang.NewClient(p.conf, golang.WithQueryRouteTimeout(p.c.cfg.RequestTimeout))
	if err != nil {
		return nil, fmt.Errorf("prepare the client: %w", err)
	}
	return identity, nil
}

// Close ends all connections, and with them every call.
func (p *Probe) Close() { p.c.link.close() }

// Endpoints gives the configured endpoints, host:port each.
func (p *Probe) Endpoints() []string {
	list, _ := parseEndpoints(p.c.cfg.Endpoints) // validated by NewProbe
	return list
}

// Handshake opens a connection of its own to one endpoint and makes the TLS handshake that all connections make. The state is nil where
// TLS is off.
func (p *Probe) Handshake(ctx context.Context, endpoint string) (*tls.ConnectionState, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", endpoint)
	if err != nil {
		return nil, err
	}
	defer conn.Close() //nolint:errcheck // nothing was sent that could get lost
	if p.c.link.tls == nil {
		return nil, nil
	}
	cfg := p.c.link.tls.Clone()
	cfg.NextProtos = []string{"h2"}
	if cfg.ServerName == "" {
		cfg.ServerName, _, _ = net.SplitHostPort(endpoint)
	}
	secure := tls.Client(conn, cfg)
	if err := secure.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	state := secure.ConnectionState()
	return &state, nil
}

// TopicTypes gives the types of messages that a topic takes, such as DELAY. A *StatusError is the server's refusal; 40402: there is no
// such topic.
func (p *Probe) TopicTypes(ctx context.Context, topic string) ([]string, error) {
	r, err := p.route(ctx, topic)
	if err != nil {
		return nil, err
	}
	var types []string
	for _, t := range messageTypes(r) {
		types = append(types, typeNames([]v2.MessageType{t}))
	}
	return types, nil
}

func (p *Probe) route(ctx context.Context, topic string) (*v2.QueryRouteResponse, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	r, err := p.c.queryRoute(topic) // bounded by the request timeout
	if err != nil {
		return nil, err
	}
	if code := r.GetStatus().GetCode(); code != v2.Code_OK {
		return nil, refusal(int32(code), r.GetStatus().GetMessage())
	}
	if len(r.GetMessageQueues()) == 0 {
		return nil, fmt.Errorf("topic %s has no queue: no broker serves it", topic)
	}
	return r, nil
}

// Visit is a probe's stay in a consumer group, as a consumer that receives only when it is told to.
type Visit struct {
	// Attempts is how often the group delivers a message before it goes to the dead letters.
	Attempts int

	p     *Probe
	group *v2.Resource
	topic *v2.Resource
	route *v2.QueryRouteResponse // nil when the topic has none
	sign  func(context.Context) context.Context
	end   context.CancelFunc
}

// Visit joins a group with a subscription to the whole of the topic, as its consumers have it. The topic need not exist; of the error,
// [IsNoGroup] says that the group does not. Leave must be called.
func (p *Probe) Visit(ctx context.Context, group, topic string) (*Visit, error) {
	identity, err := p.identity()
	if err != nil {
		return nil, err
	}
	v := &Visit{
		p: p, sign: identity.Sign,
		group: &v2.Resource{Name: group, ResourceNamespace: p.c.cfg.Namespace},
		topic: &v2.Resource{Name: topic, ResourceNamespace: p.c.cfg.Namespace},
	}
	v.route, _ = p.route(ctx, topic) // who sends or receives learns of it
	cc, err := p.c.link.conn(p.target(v.route))
	if err != nil {
		return nil, err
	}
	// The stream lives as long as the visit: with it, the server forgets the settings.
	streamCtx, end := context.WithCancel(p.c.link.ctx)
	stop := context.AfterFunc(ctx, end)
	defer stop()
	role := v2.ClientType_SIMPLE_CONSUMER
	stream, err := v2.NewMessagingServiceClient(cc).Telemetry(v.signed(streamCtx))
	if err == nil {
		err = stream.Send(&v2.TelemetryCommand{Command: &v2.TelemetryCommand_Settings{Settings: &v2.Settings{
			ClientType:     &role,
			AccessPoint:    p.c.endpoints,
			RequestTimeout: durationpb.New(p.c.cfg.RequestTimeout),
			UserAgent:      &v2.UA{Language: v2.Language_GOLANG, Version: "5.1.4"},
			PubSub: &v2.Settings_Subscription{Subscription: &v2.Subscription{
				Group:              v.group,
				Subscriptions:      []*v2.SubscriptionEntry{{Topic: v.topic, Expression: everything()}},
				LongPollingTimeout: durationpb.New(awaitDuration),
			}},
		}}})
		if errors.Is(err, io.EOF) {
			err = nil // Recv has the reason
		}
	}
	for err == nil {
		var cmd *v2.TelemetryCommand
		if cmd, err = stream.Recv(); err != nil {
			break
		}
		if settings := cmd.GetSettings(); settings != nil {
			v.Attempts, v.end = int(settings.GetBackoffPolicy().GetMaxAttempts()), end
			return v, nil
		}
		if st := cmd.GetStatus(); st != nil && st.GetCode() != v2.Code_OK {
			err = refusal(int32(st.GetCode()), st.GetMessage())
		}
	}
	end()
	if errors.Is(err, io.EOF) {
		err = errors.New("the server closed the stream")
	}
	return nil, fmt.Errorf("join group %s: %w", group, edge(ctx, p.c.link.explain(err)))
}

func everything() *v2.FilterExpression {
	return &v2.FilterExpression{Type: v2.FilterType_TAG, Expression: "*"}
}

func (v *Visit) signed(ctx context.Context) context.Context { return v.p.c.link.withToken(v.sign(ctx)) }

// target is where the calls of a topic go.
func (p *Probe) target(r *v2.QueryRouteResponse) string {
	if queues := r.GetMessageQueues(); len(queues) > 0 {
		return targetOf(queues[0].GetBroker().GetEndpoints())
	}
	return p.c.access[0]
}

// Leave ends the visit: the server forgets that there was such a client.
func (v *Visit) Leave() {
	defer v.end()
	ctx, cancel := context.WithTimeout(v.p.c.link.ctx, v.p.c.cfg.RequestTimeout)
	defer cancel()
	if cc, err := v.p.c.link.conn(v.p.target(v.route)); err == nil {
		// Unsaid, the server finds out by itself, from the stream that ends.
		_, _ = v2.NewMessagingServiceClient(cc).NotifyClientTermination(v.signed(ctx), &v2.NotifyClientTerminationRequest{Group: v.group})
	}
}

// Send stores one message and returns its id. Other than a Producer's, the message need not be of a type that the topic takes. One
// attempt; a *StatusError is the server's refusal.
func (v *Visit) Send(ctx context.Context, body string, deliverAt time.Time) (messageID string, err error) {
	if v.route == nil {
		return "", fmt.Errorf("topic %s has no route", v.topic.GetName())
	}
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails (crypto/rand, since Go 1.24)
	host, _ := os.Hostname()
	target := v.p.target(v.route)
	cc, err := v.p.c.link.conn(target)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, v.p.c.cfg.RequestTimeout)
	defer cancel()
	reply, err := v2.NewMessagingServiceClient(cc).SendMessage(v.signed(ctx), &v2.SendMessageRequest{Messages: []*v2.Message{{
		Topic: v.topic,
		Body:  []byte(body),
		SystemProperties: &v2.SystemProperties{
			MessageId:         "01" + hex.EncodeToString(id[:]),
			MessageType:       v2.MessageType_DELAY,
			DeliveryTimestamp: timestamppb.New(ceilMilli(deliverAt)),
			BodyEncoding:      v2.Encoding_IDENTITY,
			BornTimestamp:     timestamppb.Now(),
			BornHost:          host,
		},
	}}})
	if err != nil {
		return "", fmt.Errorf("send to topic %s: %w", v.topic.GetName(), v.p.c.link.explain(err))
	}
	if code := reply.GetStatus().GetCode(); code != v2.Code_OK {
		return "", fmt.Errorf("send to topic %s: %w", v.topic.GetName(), refusal(int32(code), reply.GetStatus().GetMessage()))
	}
	return reply.GetEntries()[0].GetMessageId(), nil
}

// Stored is a received message.
type Stored struct {
	MessageID string
	Body      string
	DeliverAt time.Time // as asked for
	// StoredAt is the broker's clock when the message became one that can be received: for a timed message the moment at which its
	// timer fired, not that of the send.
	StoredAt   time.Time
	ReceivedAt time.Time // our clock

	handle string
}

// Receive takes up to 32 messages of each broker, waiting some seconds for the first; they are hidden for the shortest time that is
// allowed, 10 s. None: nil, nil.
func (v *Visit) Receive(ctx context.Context) ([]Stored, error) {
	if v.route == nil {
		return nil, fmt.Errorf("topic %s has no route", v.topic.GetName())
	}
	var queues []*v2.MessageQueue // one of each broker stands for all of them
	for _, q := range v.route.GetMessageQueues() {
		if !slices.ContainsFunc(queues, func(o *v2.MessageQueue) bool { return o.GetBroker().GetName() == q.GetBroker().GetName() }) {
			queues = append(queues, q)
		}
	}
	var (
		mu    sync.Mutex
		group sync.WaitGroup
		all   []Stored
		errs  []error
	)
	for _, q := range queues {
		group.Go(func() {
			got, err := v.receive(ctx, q)
			mu.Lock()
			defer mu.Unlock()
			all, errs = append(all, got...), append(errs, err)
		})
	}
	group.Wait()
	return all, errors.Join(errs...)
}

func (v *Visit) receive(ctx context.Context, queue *v2.MessageQueue) ([]Stored, error) {
	cc, err := v.p.c.link.conn(targetOf(queue.GetBroker().GetEndpoints()))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, awaitDuration+v.p.c.cfg.RequestTimeout)
	defer cancel()
	stream, err := v2.NewMessagingServiceClient(cc).ReceiveMessage(v.signed(ctx), &v2.ReceiveMessageRequest{
		Group: v.group, MessageQueue: queue, FilterExpression: everything(), BatchSize: maxBatch, InvisibleDuration: durationpb.New(minInvisible),
	})
	if err != nil {
		return nil, v.p.c.link.explain(err)
	}
	var got []Stored
	for {
		frame, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return got, nil
		}
		if err != nil {
			return got, fmt.Errorf("receive from topic %s: %w", v.topic.GetName(), edge(ctx, err))
		}
		if st := frame.GetStatus(); st != nil && st.GetCode() != v2.Code_OK && st.GetCode() != v2.Code_MESSAGE_NOT_FOUND {
			return got, fmt.Errorf("receive from topic %s: %w", v.topic.GetName(), refusal(int32(st.GetCode()), st.GetMessage()))
		}
		if m := frame.GetMessage(); m != nil {
			sys := m.GetSystemProperties()
			got = append(got, Stored{
				MessageID: sys.GetMessageId(), Body: string(m.GetBody()), DeliverAt: sys.GetDeliveryTimestamp().AsTime(), StoredAt: sys.GetStoreTimestamp().AsTime(),
				ReceivedAt: time.Now(), handle: sys.GetReceiptHandle(),
			})
		}
	}
}

// Ack acknowledges a received message.
func (v *Visit) Ack(ctx context.Context, m Stored) error {
	cc, err := v.p.c.link.conn(v.p.target(v.route))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, v.p.c.cfg.RequestTimeout)
	defer cancel()
	reply, err := v2.NewMessagingServiceClient(cc).AckMessage(v.signed(ctx), &v2.AckMessageRequest{
		Group: v.group, Topic: v.topic, Entries: []*v2.AckMessageEntry{{MessageId: m.MessageID, ReceiptHandle: m.handle}},
	})
	if err == nil && reply.GetStatus().GetCode() != v2.Code_OK {
		err = refusal(int32(reply.GetStatus().GetCode()), reply.GetStatus().GetMessage())
	}
	if err != nil {
		return fmt.Errorf("acknowledge message %s: %w", m.MessageID, err)
	}
	return nil
}

// IsNoTopic says that the server has no such topic (40402).
func IsNoTopic(err error) bool {
	code, ok := Code(err)
	return ok && v2.Code(code) == v2.Code_TOPIC_NOT_FOUND
}

// IsNoGroup says that a group was refused when it was joined, which a server does when it has none of that name.
func IsNoGroup(err error) bool {
	code, _ := Code(err)
	// The proxy ends the stream with InvalidArgument; the code 40403 is in its text.
	return v2.Code(code) == v2.Code_CONSUMER_GROUP_NOT_FOUND || transportCode(err) == codes.InvalidArgument
}

// IsNoRight says that the server refuses the credentials, or their lack (40100, 40300).
func IsNoRight(err error) bool {
	code, _ := Code(err)
	return v2.Code(code) == v2.Code_UNAUTHORIZED || v2.Code(code) == v2.Code_FORBIDDEN
}

// IsTooFar says that a delivery time lies farther ahead than the server takes (40012 of the proxy; the broker's own limit has no code).
func IsTooFar(err error) bool {
	code, _ := Code(err)
	return v2.Code(code) == v2.Code_ILLEGAL_DELIVERY_TIME
}
