package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// ErrNotFound is wrapped by errors of calls that name a topic or a group that the broker does not have.
var ErrNotFound = errors.New("not found")

// Error is a refusal by the broker.
type Error struct {
	Code   int    // RocketMQ's ResponseCode
	Remark string // the broker's own words, for people
}

func (e *Error) Error() string { return fmt.Sprintf("refused with code %d: %s", e.Code, e.Remark) }

// Unwrap makes errors.Is(err, ErrNotFound) true for the codes that mean it.
func (e *Error) Unwrap() error {
	switch e.Code {
	case codeTopicNotExist, codeGroupNotExist, codeQueryNotFound:
		return ErrNotFound
	}
	return nil
}

// TopicType says what kind of messages a topic takes. A topic takes one kind only, and the broker compares the words letter by letter.
type TopicType string

const (
	// Normal messages are delivered at once.
	Normal TopicType = "NORMAL"
	// Delay is for timed messages. A message without a delivery time is refused.
	Delay TopicType = "DELAY"
	// FIFO messages are delivered in order within their message group.
	FIFO TopicType = "FIFO"
	// Transaction messages are delivered after a second step of the sender.
	Transaction TopicType = "TRANSACTION"
)

// Topic is a topic's configuration on the broker.
type Topic struct {
	Name   string
	Type   TopicType
	Queues int // read queues
}

// Group is a consumer group's configuration on the broker.
type Group struct {
	Name    string
	Retries int // deliveries after the first; then the message goes to the dead-letter topic
}

// QueueOffsets tells where one queue of a topic stands. Min is the first message that is still there, Max one past the last; Committed is the
// group's next message, or -1 where it has none yet.
type QueueOffsets struct {
	Queue     int
	Min, Max  int64
	Committed int64
}

// Request and answer codes: RequestCode.java and ResponseCode.java of RocketMQ 5.5.0.
const (
	queryConsumerOffset = 14
	createTopic         = 17
	getBrokerConfig     = 26
	getRuntimeInfo      = 28
	getMaxOffset        = 30
	getMinOffset        = 31
	getRoute            = 105
	createGroup         = 200
	deleteGroup         = 207
	deleteTopic         = 215
	deleteTopicRoute    = 216
	resetOffset         = 222
	deleteExpiredFiles  = 329
	getTopicConfig      = 351
	getGroupConfig      = 352

	codeTopicNotExist = 17
	codeQueryNotFound = 22
	codeGroupNotExist = 26
)

// callTimeout ends a call whose context has no earlier deadline. Creating a topic on a busy two-core machine has taken the broker up to two
// seconds.
const callTimeout = 10 * time.Second

// Client administers one broker. It holds no connection between calls, so it needs no closing, and it is safe for concurrent use. It speaks
// plaintext without credentials: a broker with TLS enforced or ACL on refuses it.
type Client struct {
	addr    string
	servers []string // name servers, host:port; nil: those that the broker names
	opaque  atomic.Int32
}

// New returns a client of the broker whose remoting port (`listenPort` of broker.conf) is at addr, host:port. It does not connect. The name
// servers, host:port each, take the place of those that the broker names; a broker in a container names them as only containers know them.
func New(addr string, nameServers ...string) *Client {
	return &Client{addr: addr, servers: nameServers}
}

// CreateTopic creates the topic, or changes it to what is asked, and returns when the name server knows it. Only then can the topic be
// used: a proxy that is asked for it any earlier answers "not found" for 20 seconds.
func (c *Client) CreateTopic(ctx context.Context, name string, t TopicType, queues int) error {
	err := c.createTopic(ctx, name, t, queues)
	if err != nil {
		return fmt.Errorf("create topic %s on %s: %w", name, c.addr, err)
	}
	return nil
}

func (c *Client) createTopic(ctx context.Context, name string, t TopicType, queues int) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	n := strconv.Itoa(queues)
	_, err := c.call(ctx, c.addr, createTopic, map[string]string{
		"topic":           name,
		"defaultTopic":    "TBW102", // required by the protocol and without meaning here
		"readQueueNums":   n,
		"writeQueueNums":  n,
		"perm":            "6",
		"topicFilterType": "SINGLE_TAG",
		"topicSysFlag":    "0",
		"order":           "false",
		"attributes":      "+message.type=" + string(t),
	}, nil)
	if err != nil {
		return err
	}
	servers, err := c.nameServers(ctx)
	if err != nil {
		return err
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for _, server := range servers {
		for {
			_, err := c.call(ctx, server, getRoute, map[string]string{"topic": name}, nil)
			if err == nil {
				break
			}
			if !errors.Is(err, ErrNotFound) {
				return fmt.Errorf("route at name server %s: %w", server, err)
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("route at name server %s: %w", server, err)
			case <-tick.C:
			}
		}
	}
	return nil
}

// Topic returns the topic's configuration; ErrNotFound if there is no such topic.
func (c *Client) Topic(ctx context.Context, name string) (Topic, error) {
	answer, err := c.call(ctx, c.addr, getTopicConfig, map[string]string{"topic": name}, nil)
	if err != nil {
		return Topic{}, fmt.Errorf("look up topic %s on %s: %w", name, c.addr, err)
	}
	var config struct {
		ReadQueueNums int               `json:"readQueueNums"`
		Attributes    map[string]string `json:"attributes"`
	}
	if err := json.Unmarshal(answer.Body, &config); err != nil {
		return Topic{}, fmt.Errorf("look up topic %s on %s: %w", name, c.addr, err)
	}
	t := Topic{Name: name, Type: Normal, Queues: config.ReadQueueNums}
	if v := config.Attributes["message.type"]; v != "" {
		t.Type = TopicType(v)
	}
	return t, nil
}

// DeleteTopic removes the topic with its messages from the broker and from the name servers. A topic that is not there is no error.
func (c *Client) DeleteTopic(ctx context.Context, name string) error {
	if _, err := c.call(ctx, c.addr, deleteTopic, map[string]string{"topic": name}, nil); err != nil && !errors.Is(err, ErrNotFound) {
		return fmt.Errorf("delete topic %s on %s: %w", name, c.addr, err)
	}
	servers, err := c.nameServers(ctx)
	if err != nil {
		return fmt.Errorf("delete topic %s: %w", name, err)
	}
	for _, server := range servers {
		if _, err := c.call(ctx, server, deleteTopicRoute, map[string]string{"topic": name}, nil); err != nil && !errors.Is(err, ErrNotFound) {
			return fmt.Errorf("delete topic %s at name server %s: %w", name, server, err)
		}
	}
	return nil
}

// CreateGroup creates the consumer group, or changes it to what is asked. A message is delivered at most retries+1 times before it goes to
// the dead-letter topic.
func (c *Client) CreateGroup(ctx context.Context, name string, retries int) error {
	// The broker takes a missing field for the type's zero value, so every one is sent.
	body, err := json.Marshal(map[string]any{
		"groupName":                      name,
		"consumeEnable":                  true,
		"consumeFromMinEnable":           true,
		"consumeBroadcastEnable":         false,
		"consumeMessageOrderly":          false,
		"retryQueueNums":                 1,
		"retryMaxTimes":                  retries,
		"groupRetryPolicy":               map[string]string{"type": "CUSTOMIZED"},
		"brokerId":                       0,
		"whichBrokerWhenConsumeSlowly":   1,
		"notifyConsumerIdsChangedEnable": true,
		"groupSysFlag":                   0,
		"consumeTimeoutMinute":           15,
		"attributes":                     map[string]string{},
	})
	if err != nil {
		return fmt.Errorf("create group %s: %w", name, err)
	}
	if _, err := c.call(ctx, c.addr, createGroup, nil, body); err != nil {
		return fmt.Errorf("create group %s on %s: %w", name, c.addr, err)
	}
	return nil
}

// Group returns the consumer group's configuration; ErrNotFound if there is no such group.
func (c *Client) Group(ctx context.Context, name string) (Group, error) {
	answer, err := c.call(ctx, c.addr, getGroupConfig, map[string]string{"group": name}, nil)
	if err != nil {
		return Group{}, fmt.Errorf("look up group %s on %s: %w", name, c.addr, err)
	}
	var config struct {
		RetryMaxTimes int `json:"retryMaxTimes"`
	}
	if err := json.Unmarshal(answer.Body, &config); err != nil {
		return Group{}, fmt.Errorf("look up group %s on %s: %w", name, c.addr, err)
	}
	return Group{Name: name, Retries: config.RetryMaxTimes}, nil
}

// DeleteGroup removes the consumer group and its offsets. A group that is not there is no error.
func (c *Client) DeleteGroup(ctx context.Context, name string) error {
	_, err := c.call(ctx, c.addr, deleteGroup, map[string]string{"groupName": name, "cleanOffset": "true"}, nil)
	if err != nil && !errors.Is(err, ErrNotFound) {
		return fmt.Errorf("delete group %s on %s: %w", name, c.addr, err)
	}
	return nil
}

// ResetOffset moves the group to the first message of the topic stored at or after at, in the given queues, or in all if none is given. The
// zero time means the oldest message that is there.
func (c *Client) ResetOffset(ctx context.Context, group, topic string, at time.Time, queues ...int) error {
	if len(queues) == 0 {
		queues = []int{-1}
	}
	var since int64
	if !at.IsZero() {
		since = at.UnixMilli()
	}
	for _, queue := range queues {
		_, err := c.call(ctx, c.addr, resetOffset, map[string]string{
			"group":     group,
			"topic":     topic,
			"queueId":   strconv.Itoa(queue),
			"timestamp": strconv.FormatInt(since, 10),
			"isForce":   "true",
		}, nil)
		if err != nil {
			return fmt.Errorf("reset group %s on topic %s at %s: %w", group, topic, c.addr, err)
		}
	}
	return nil
}

// DeleteExpiredFiles has the broker look now for commit log files older than its fileReservedTime, which it otherwise does at one hour of
// the day. It returns before they are gone; that takes some ten seconds more.
func (c *Client) DeleteExpiredFiles(ctx context.Context) error {
	if _, err := c.call(ctx, c.addr, deleteExpiredFiles, nil, nil); err != nil {
		return fmt.Errorf("delete expired files of %s: %w", c.addr, err)
	}
	return nil
}

// Offsets returns where each queue of the topic and the group on it stand, by queue. The answers are of slightly different moments.
func (c *Client) Offsets(ctx context.Context, group, topic string) ([]QueueOffsets, error) {
	t, err := c.Topic(ctx, topic)
	if err != nil {
		return nil, err
	}
	offsets := make([]QueueOffsets, t.Queues)
	for i := range offsets {
		fields := map[string]string{"topic": topic, "queueId": strconv.Itoa(i), "consumerGroup": group}
		o := QueueOffsets{Queue: i}
		if o.Min, err = c.offset(ctx, getMinOffset, fields); err == nil {
			if o.Max, err = c.offset(ctx, getMaxOffset, fields); err == nil {
				o.Committed, err = c.offset(ctx, queryConsumerOffset, fields)
				if errors.Is(err, ErrNotFound) {
					o.Committed, err = -1, nil
				}
			}
		}
		if err != nil {
			return nil, fmt.Errorf("offsets of queue %d of topic %s on %s: %w", i, topic, c.addr, err)
		}
		offsets[i] = o
	}
	return offsets, nil
}

func (c *Client) offset(ctx context.Context, code int, fields map[string]string) (int64, error) {
	if code == queryConsumerOffset {
		with := map[string]string{"setZeroIfNotFound": "false"}
		for k, v := range fields {
			with[k] = v
		}
		fields = with
	}
	answer, err := c.call(ctx, c.addr, code, fields, nil)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(answer.ExtFields["offset"], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("answer without an offset: %w", err)
	}
	return n, nil
}

// BrokerConfig returns the configuration that is in force on the broker. It is the only way to learn what became of broker.conf, since the
// broker drops keys and values that it does not understand without a word.
func (c *Client) BrokerConfig(ctx context.Context) (map[string]string, error) {
	answer, err := c.call(ctx, c.addr, getBrokerConfig, nil, nil)
	if err != nil {
		return nil, fmt.Errorf("read the configuration of %s: %w", c.addr, err)
	}
	config := make(map[string]string)
	for line := range strings.Lines(string(answer.Body)) {
		if key, value, ok := strings.Cut(strings.TrimRight(line, "\r\n"), "="); ok {
			config[key] = value
		}
	}
	return config, nil
}

// RuntimeInfo returns the broker's own figures, among them timerReadBehind (seconds that the timer lags) and commitLogDiskRatio.
func (c *Client) RuntimeInfo(ctx context.Context) (map[string]string, error) {
	answer, err := c.call(ctx, c.addr, getRuntimeInfo, nil, nil)
	if err != nil {
		return nil, fmt.Errorf("read the figures of %s: %w", c.addr, err)
	}
	var body struct {
		Table map[string]string `json:"table"`
	}
	if err := json.Unmarshal(answer.Body, &body); err != nil {
		return nil, fmt.Errorf("read the figures of %s: %w", c.addr, err)
	}
	return body.Table, nil
}

func (c *Client) nameServers(ctx context.Context) ([]string, error) {
	if len(c.servers) > 0 {
		return c.servers, nil
	}
	config, err := c.BrokerConfig(ctx)
	if err != nil {
		return nil, err
	}
	servers := strings.FieldsFunc(config["namesrvAddr"], func(r rune) bool { return r == ';' })
	if len(servers) == 0 {
		return nil, fmt.Errorf("broker %s names no name server (namesrvAddr is empty)", c.addr)
	}
	return servers, nil
}

// call sends one request on a connection of its own and returns the answer; *Error if it is a refusal.
func (c *Client) call(ctx context.Context, addr string, code int, fields map[string]string, body []byte) (*command, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	defer conn.Close() //nolint:errcheck // the answer is here, or an error that says more
	// Also cuts off reads and writes when the caller gives up before the deadline.
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()

	request := &command{
		Code:      code,
		Language:  "GO",
		Opaque:    int(c.opaque.Add(1)),
		ExtFields: fields,
		Encoding:  "JSON",
		Body:      body,
	}
	frame, err := request.encode()
	if err != nil {
		return nil, err
	}
	if _, err := conn.Write(frame); err != nil {
		return nil, cause(ctx, err)
	}
	for {
		answer, err := readCommand(conn)
		if err != nil {
			return nil, cause(ctx, err)
		}
		// The broker may ask something of its clients on the same connection; only our answer counts.
		if answer.Flag&responseFlag == 0 || answer.Opaque != request.Opaque {
			continue
		}
		if answer.Code != 0 {
			return nil, &Error{Code: answer.Code, Remark: answer.Remark}
		}
		return answer, nil
	}
}

// cause prefers the context's reason to the broken connection that it led to.
func cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%w (%w)", ctx.Err(), err)
	}
	return err
}
