"""The texts that `pagecast tokenizer-report` counts, the same content in Chinese and in English, and a piece of code."""

CHINESE = (
    "清晨的市场里，卖菜的人已经把摊位摆好了。白菜、萝卜和刚从地里挖出来的土豆堆得整整齐齐，旁边的小黑板上写着今天的价钱。"
    "一位老人问：“这些苹果甜吗？”摊主笑着切下一小块请他尝。他点点头，买了三斤，又多要了两根葱。下雨以后，街上的人少了一些，"
    "但是面馆门口还是排着队。据说这家店开了四十多年，汤每天要熬六个小时。科学家认为，人的味觉会随着年龄改变，所以小时候不喜欢的"
    "东西，长大以后也许会觉得好吃。2024年的一次调查显示，百分之六十三的城市居民每周至少在家做五次饭。"
)
ENGLISH = (
    "Early in the morning the people who sell vegetables have already set up their stalls at the market. Cabbages, radishes and potatoes "
    "fresh from the field lie in neat piles, and a small blackboard beside them shows the prices of the day. An old man asks whether the "
    "apples are sweet; the seller laughs and cuts him a small piece to try. He nods, buys three pounds, and asks for two more spring "
    "onions. After the rain there are fewer people in the street, but a line still waits in front of the noodle shop. They say it has "
    "been open for more than forty years, and that its broth simmers for six hours every day. Scientists think that our sense of taste "
    "changes with age, so what we did not like as children may taste good to us later. A survey in 2024 showed that sixty-three percent of "
    "people in cities cook at home at least five times a week."
)
CODE = '''def merge(left: list[int], right: list[int]) -> list[int]:
    """Two sorted lists as one."""
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]
'''

SAMPLES = {"Chinese": CHINESE, "English": ENGLISH, "code": CODE}
